"""Tables out of aiconfigurator-core; those that need it are skipped where it is not installed."""

from __future__ import annotations

import importlib.metadata
from datetime import UTC, datetime
from pathlib import Path

import pytest

from catalog import reads
from catalog.store import Catalog
from planner.errors import UnknownNameError
from planner.perf.tables import LayerRow
from tasks.aiconfigurator import AiconfiguratorError
from tasks.inputs import performance_model
from tasks.profile_catalog import import_system, known_of

NOW = datetime(2026, 11, 30, tzinfo=UTC)
MODEL, CARD, SYSTEM = "Qwen/Qwen3-14B", "H100", "h100_sxm"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    found = Catalog(tmp_path / "home")
    known_of(found)
    return found


def rows_of(catalog: Catalog, profile_name: str) -> dict[tuple[object, ...], LayerRow]:
    with catalog.read() as connection:
        tables = performance_model(reads.read_performance(connection))
    rows = tables.rows[MODEL, "bf16", profile_name, 2]
    return {(r.phase, r.batch, r.tokens, r.context): r for r in rows}


def test_the_shipped_tables_come_out_again(catalog: Catalog) -> None:
    pytest.importorskip("aiconfigurator_core")
    gpu = known_of(catalog).gpus[CARD]
    shipped = rows_of(catalog, gpu.profile_name)
    found = import_system(str(catalog.home), SYSTEM, CARD, MODEL, (2,), NOW)
    assert "vLLM 0.24.0" in found.source
    imported = rows_of(catalog, gpu.profile_name)
    both = shipped.keys() & imported.keys()
    assert len(both) == len(imported) == 57
    close = [
        getattr(imported[key], part) == pytest.approx(getattr(shipped[key], part), rel=0.01)
        for key in both
        for part in ("linear_ms", "attention_ms", "head_ms")
    ]
    assert sum(close) >= 0.9 * len(close)  # the importer lifts what falls with more work


def test_a_card_that_is_not_known_is_made(catalog: Catalog) -> None:
    pytest.importorskip("aiconfigurator_core")
    import_system(str(catalog.home), "gb200", "GB200", MODEL, (1,), NOW)
    card = known_of(catalog).gpus["GB200"]
    assert card.memory_gib > 100 and card.compute_capability == 10.0
    with pytest.raises(AiconfiguratorError, match="has no system 'h300'"):
        import_system(str(catalog.home), "h300", "H300", MODEL, (), NOW)


def test_what_is_missing_is_said(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(catalog.home)
    with pytest.raises(AiconfiguratorError, match="say which model"):
        import_system(home, SYSTEM, None, MODEL, (), NOW)
    with pytest.raises(UnknownNameError, match="no/model"):
        import_system(home, SYSTEM, CARD, "no/model", (), NOW)
    with pytest.raises(AiconfiguratorError, match="is in mxfp4; layers are added up in bf16"):
        import_system(home, SYSTEM, CARD, "openai/gpt-oss-120b", (), NOW)
    for version, message in (
        (None, r"not installed: pip install 'coral-serving\[aiconfigurator\]'"),
        ("0.13.0", r"0.13.0 is installed, the importer knows 0.12.\*"),
    ):

        def answer(name: str, said: str | None = version) -> str:
            if said is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return said

        monkeypatch.setattr(importlib.metadata, "version", answer)
        with pytest.raises(AiconfiguratorError, match=message):
            import_system(home, SYSTEM, CARD, MODEL, (), NOW)
