"""Commands of the machines that serve: agent, controller, gateway. No Prefect, no DuckDB."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Home = Annotated[
    str | None,
    typer.Option("--home", help="Coral's home folder. [CORAL_HOME or ~/.local/share/coral]"),
]


def add_commands(app: typer.Typer) -> None:
    """Register them."""
    app.command()(agent)
    app.command()(controller)
    app.command()(gateway)


def agent(
    lease: Annotated[str, typer.Option(help="Id of this node's lease.")],
    controller: Annotated[str, typer.Option(help="Where the controller listens: tcp://host:port.")],
    controller_key: Annotated[str, typer.Option(help="The controller's public key.")],
    key_file: Annotated[
        Path, typer.Option(help="File with this lease's keys; made first where the node enrols.")
    ],
    folder: Annotated[Path, typer.Option(help="Folder of the processes' logs.")],
    first_lease: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for the controller at first.")
    ] = 120.0,
    metadata: Annotated[
        str | None,
        typer.Option(
            help="Where the cloud says that it takes the node; on EC2 http://169.254.169.254."
        ),
    ] = None,
    enrol: Annotated[
        str | None,
        typer.Option(
            help="Where a node that makes its keys itself asks to be let in: tcp://host:port."
        ),
    ] = None,
    ticket: Annotated[str, typer.Option(help="Of the lease, to enrol with.")] = "",
    began: Annotated[
        float | None, typer.Option(help="When the node's user data began; seconds since 1970.")
    ] = None,
    installed: Annotated[float | None, typer.Option(help="When all was installed.")] = None,
) -> None:
    """Run this node: start, watch and stop what the controller says; end when it is gone."""
    from executor.control.agent import Agent, AgentSettings
    from executor.control.join import Joining, join
    from executor.control.keys import load_or_make, read_keys

    _log_to_stderr()
    keys = read_keys(key_file) if enrol is None else load_or_make(key_file)
    if enrol is not None:
        join(Joining(enrol, controller_key, lease, ticket, began, installed), keys)
    running = Agent(
        AgentSettings(lease, controller, controller_key, keys, folder, first_lease, metadata)
    )
    _on_signals(lambda: running.stop("asked to end"))
    typer.echo(running.run(), err=True)


def controller(
    home: Home = None,
    address: Annotated[
        str,
        typer.Option(
            help="Where agents connect, and nodes of a cloud enrol one port above; * takes free "
            "ports."
        ),
    ] = "tcp://127.0.0.1:*",
    lease: Annotated[
        float,
        typer.Option(min=5.0, help="Seconds that nodes go on when this controller is gone."),
    ] = 30.0,
) -> None:
    """Bring nodes to what is deployed, and tell gateways which replicas answer."""
    from executor.daemon import Daemon
    from executor.home import resolve_home

    _log_to_stderr()
    ended = []
    _on_signals(lambda: ended.append(True))
    with Daemon(resolve_home(home), address, lease) as daemon:
        found = daemon.controller
        typer.echo(f"controller at {found.address}, nodes enrol at {found.enrol_address}", err=True)
        while not ended:
            daemon.step()


def gateway(
    home: Home = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Answer OpenAI-compatible requests with the replicas that are ready."""
    import uvicorn

    from executor.gateway.app import make_app
    from executor.home import resolve_home

    folder = resolve_home(home)
    folder.mkdir(parents=True, exist_ok=True)
    refuse_taken(host, port)
    typer.echo(f"gateway at http://{host}:{port}", err=True)
    _on_signals(lambda: None)  # the server has handlers of its own, and gives these back
    config = uvicorn.Config(
        make_app(folder / "routes.json"), host=host, port=port, log_level="warning",
        timeout_graceful_shutdown=60,
    )  # fmt: skip
    uvicorn.Server(config).run()


def refuse_taken(host: str, port: int) -> None:
    """Say it before the server's own log does.

    Raises PortTakenError: something listens there already, or the address is not this machine's.
    """
    import socket

    from executor.gateway.app import PortTakenError

    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
        except OSError as error:
            raise PortTakenError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
            ) from error


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _on_signals(stop: Callable[[], None]) -> None:
    """End in order, not at once as flows do."""
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop())
