"""What each baseline costs and serves against Coral over the fixed suite.

    python -m bench.baselines --deadline 20 --json

Cost ratios (baseline / Coral) where both serve everything, goodput ratios (Coral / baseline,
planned served tokens/s) elsewhere. Planners that go one workload after another are means over
orders.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from bench.scenarios import suite_arguments, suite_inputs
from tasks.comparison import Case, plan_cases
from tasks.comparison_view import Line, ratios


def main() -> None:
    """Parse, plan, print."""
    parser = suite_arguments(__doc__, deadline_s=20.0)
    options = parser.parse_args()
    lines: list[Line] = []
    console = Console(stderr=True)
    with suite_inputs(options.scenario, options.home, options.deadline, options.only) as instances:
        for instance, data in instances:
            lines += plan_cases([Case(instance.id, instance.stratum, data)])
            console.print(f"{instance.id} planned")
    result: dict[str, object] = {"instances": len({line.case for line in lines})}
    for ratio in ratios(lines):
        name = ratio.planner.replace(", ", "_").replace(" ", "_").replace("-", "_")
        result |= {
            f"ratio_{name}_max": ratio.cost_max,
            f"ratio_{name}_median": ratio.cost_median,
            f"goodput_ratio_{name}_max": ratio.goodput_max,
            f"goodput_ratio_{name}_median": ratio.goodput_median,
            f"cost_cases_{name}": ratio.cost_cases,
        }
    if options.json:
        print(json.dumps({**result, "lines": [asdict(line) for line in lines]}))
        return
    table = Table("figure", "value")
    for name, value in result.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
