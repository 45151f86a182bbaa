"""Tables of docs/reproduction.md from the committed results, so that no number there is typed by hand.

    python -m fishleg.paper.tables experiments/results/paper docs/reproduction.md

fills what stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fishleg.formats.checkpoint import write_atomically
from reproduction.paper import ablation, claims, estimation, init, layer
from reproduction.paper.ablation import shared
from reproduction.paper.config import ARMS, REPORTED

Cell = str | float | None | dict[str, Any]


def tables(results: Path) -> dict[str, str]:
    """Every table by name, as Markdown."""
    records = {
        name: json.loads((results / f"{name}.json").read_text("utf-8"))
        for name in (init.NAME, estimation.NAME, ablation.NAME, claims.NAME, layer.NAME)
    }
    found: dict[str, str] = {}
    found.update(_init(records["init"]))
    found.update(_estimation(records["estimation"]["summary"]))
    found.update(_ablation(records["ablation"]))
    found.update(_claims(records["claims"]["summary"]))
    found.update(_layer(records["layer"]["summary"]))
    return {**found, **tables_of(results), "cost": cost(results), "cost-arms": relative_cost(results)}


Parts = tuple[str, float, list[float]]  # a dense model, its training, and what starts from it: CPU seconds


def cost(results: Path) -> str:
    """Core-hours of every experiment with ResNet18, and the hours of two cores for all of a dataset.

    A dense model that several start from is counted once. Where a part's CPU seconds were not noted, those by
    the clock stand in for them: never less.
    """
    rows: list[list[Cell]] = []
    for dataset, experiments in REPORTED.items():
        known: list[Parts] = []
        total = 0.0
        for name, config in experiments:
            path = results / f"{name}-{config}.json"
            if not path.exists():
                continue
            units = json.loads(path.read_text("utf-8"))["units"]
            dense = units.pop("dense")
            training = sum(epoch.get("cpu_seconds", 0.0) for epoch in dense["curve"])
            spent = [unit.get("cpu_seconds", unit.get("seconds", 0.0)) for unit in units.values()]
            core = sum(spent) + (0.0 if dense["weights"] in {key for key, _, _ in known} else training)
            known.append((dense["weights"], training, spent))
            total += core
            rows.append([f"`{name} --config {config}`", str(len(units) + 1), _hours(core), ""])
        if known:
            rows.append([f"all of {dataset}", "", _hours(total), _hours(makespan(known))])
    return markdown(["experiment", "parts", "core-hours", "hours on two cores"], rows)


def makespan(experiments: Sequence[Parts]) -> float:
    """When two processes are done that take parts from opposite ends, as those of experiments/resnet18.py do.

    Each takes the next part of the first experiment, in its order, that has any left; whoever comes first
    trains the dense model of an experiment, and the other waits for it.
    """
    left, trained, clocks = [list(parts) for _, _, parts in experiments], dict[str, float](), [0.0, 0.0]
    while any(left):
        worker = clocks.index(min(clocks))
        order = range(len(left)) if worker == 0 else reversed(range(len(left)))
        chosen = next(i for i in order if left[i])
        dense, training, _ = experiments[chosen]
        if dense in trained:
            clocks[worker] = max(clocks[worker], trained[dense]) + left[chosen].pop(0)
        else:
            clocks[worker] += training
            trained[dense] = clocks[worker]
    return max(clocks)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}"


def relative_cost(results: Path) -> str:
    """CPU seconds of each arm, by those of magnitude + SGD on the same dataset."""
    found: dict[str, dict[str, float]] = {}
    for dataset in ("cifar10", "tiny-imagenet"):
        units = json.loads((results / f"unstructured-{dataset}.json").read_text("utf-8"))["units"]
        spent: dict[str, list[float]] = {}
        for key, unit in units.items():
            if "cpu_seconds" in unit:
                spent.setdefault(key.partition(", seed")[0], []).append(unit["cpu_seconds"])
        found[dataset] = {arm: sum(seconds) / len(seconds) for arm, seconds in spent.items()}
    rows: list[list[Cell]] = []
    for arm in ARMS:
        ratios = [by_arm.get(arm, 0.0) / by_arm.get(ARMS[0], 1.0) for by_arm in found.values()]
        rows.append([arm, *(f"{ratio:.1f}" if ratio else None for ratio in ratios)])
    return markdown(["CPU time / magnitude + SGD", *found], rows)


def tables_of(results: Path) -> dict[str, str]:
    """The tables of every run with ResNet18 that has come to its end."""
    found: dict[str, str] = {}
    for path in sorted(results.glob("*structured-*.json")):
        record = json.loads(path.read_text("utf-8"))
        if "summary" in record and ".old" not in path.stem:
            make = _unstructured if path.stem.startswith("unstructured") else _semi_structured
            found.update(make(path.stem, record["summary"]))
    return found


def fill(text: str, results: Path) -> str:
    """The document with its tables renewed."""
    return renew(text, tables(results))


def renew(text: str, made: Mapping[str, str]) -> str:
    """The text with what stands between the marks of each table replaced."""

    def one(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", one, text, flags=re.DOTALL)


def _init(record: dict[str, Any]) -> dict[str, str]:
    summary, steps = record["summary"], record["settings"]["probe steps"]
    words = {
        "Q itself": "Q itself",
        "triangular": "triangular factor",
        "square": "square factor",
        "aligned": "factor, F diagonal",
    }
    descent = [
        [
            words[form],
            *(
                summary[f"{form} from {start}"][kind]
                for start in init.STARTS
                for kind in ("rate", "steps to 1 %")
            ),
        ]
        for form in init.FORMS
    ]
    natural = [summary[f"natural steps from {start}"]["steps to 1 %"] for start in init.STARTS]
    descent.append(["natural steps (ours)", "none", natural[0], "none", natural[1]])
    starts = (*init.STARTS, init.MEAN)
    noisy = [
        [
            f"Adam, probes, {form}, {steps * more} minibatches",
            *(summary[f"Adam, {form}, from {start}{words}"]["final gap"] for start in starts),
        ]
        for form in ("triangular", "square")
        for words, more in (("", 1), (init.LONGER, init.TIMES_LONGER))
    ]
    noisy.append(["ours (the start does not matter)", summary["ours, minibatches"]["final gap"], None, None])
    return {
        "init-descent": markdown(
            ["", "I: rate", "I: steps to 1 %", "I/γ: rate", "I/γ: steps to 1 %"], descent
        ),
        "init-minibatches": markdown(["", *(f"Q₀ = {start}" for start in starts)], noisy),
    }


def _estimation(summary: dict[str, Any]) -> dict[str, str]:
    times = list(next(iter(summary["A"].values())))
    full = [[arm, *(values[t] for t in times)] for arm, values in summary["A"].items()]
    arms = (
        estimation.BASELINE,
        estimation.ISOTROPIC,
        estimation.OURS,
        estimation.AIMED,
        estimation.OURS_AIMED,
        "limit: isotropic optimum",
        "limit: aimed optimum",
        "limit: least aimed error",
    )
    found = {"estimation-a": markdown(["full Q", *times], full)}
    for kind in ("aimed", "isotropic"):
        rows = [[arm, *(summary[s][arm][f"{kind} error"] for s in estimation.PANELS)] for arm in arms]
        found[f"estimation-{kind}"] = markdown([f"{kind} error", *estimation.PANELS], rows)
    same = [
        [arm, *(summary[s][arm]["from approximate-then-invert"] for s in estimation.PANELS)]
        for arm in (estimation.ISOTROPIC, estimation.OURS, estimation.AIMED, estimation.OURS_AIMED)
    ]
    found["estimation-same"] = markdown(["relative Frobenius distance", *estimation.PANELS], same)
    return found


def _ablation(record: dict[str, Any]) -> dict[str, str]:
    summary, sizes = record["summary"], record["settings"]["blocks"]
    A = []
    for key in [f"{f}, {s}" for f in shared.FACTORS for s in (*shared.SCHEDULES, "noise-free")]:
        # a record that is not complete shows dashes
        units = [summary["A"].get(f"{key}, P={P}", {}) for P in "IQ"]
        factor, _, rest = key.partition(", ")
        start = f"{factor} from {shared.FACTORS[factor]}, {rest}"
        A.append([start, *(unit.get(kind) for unit in units for kind in ("rate", "final gap"))])
    flow = [
        [start, *(
            summary["A: flow"][f"{start}, P={P}"][kind] for P in "IQ" for kind in ("rate", "steps to 1e-6")
        )]
        for start in ("I", "I/γ")
    ]  # fmt: skip
    descent = summary["A: descent on the factor"]
    kinds = list(next(iter(descent.values())))
    on_factor = [
        [start, *(descent[f"{start}, P={P}"][kind] for P in "IQ" for kind in kinds)]
        for start in dict.fromkeys(key.rpartition(",")[0] for key in descent)
    ]
    structures = ["full", "diagonal", *(f"block {size}" for size in sizes)]
    B = [
        [
            s,
            *(summary["B"][f"{s}, {who}"]["gap"] for who in ("paper", "ours")),
            summary["B"][f"{s}, ours"]["limit"],
        ]
        for s in structures
    ]
    levels = list(next(value for value in summary["C"].values() if isinstance(value, dict)))
    C = [
        [name, *(values[level] for level in levels)]
        for name, values in summary["C"].items()
        if isinstance(values, dict)
    ]
    C.append(["all weights removed", *[summary["C"]["all weights removed"]] * len(levels)])
    ranks = [[who, *values.values()] for who, values in summary["B against C, rank correlation"].items()]
    measures = {
        "mse": "mse, mean over stages",
        "full": "distance to full, mean over stages",
        "blocks": "distance to blocks, mean over stages",
    }
    arms = shared.BLOCK_ARMS
    head = [f"blocks of {size}" for size in sizes]
    found = {
        "ablation-a": markdown(["", "P = I: rate", "P = I: gap", "P = Q: rate", "P = Q: gap"], A),
        "ablation-flow": markdown(
            ["Q₀", "P = I: rate", "P = I: steps to 1e-6", "P = Q: rate", "P = Q: steps to 1e-6"], flow
        ),
        "ablation-factor": markdown(
            ["factor, Q₀", *(f"P = {P}: {kind}" for P in "IQ" for kind in kinds)], on_factor
        ),
        "ablation-b": markdown(["Q", "paper's estimator", "ours", "the structure's optimum"], B),
        "ablation-c": markdown(["test MSE at", *levels], C),
        "ablation-ranks": markdown(["rank correlation of B with C at", *levels], ranks),
    }
    for name, kind in measures.items():
        rows = [[arm, *(summary["D"][f"block {size}, {arm}"][kind] for size in sizes)] for arm in arms]
        found[f"ablation-d-{name}"] = markdown([kind, *head], rows)
    times = [summary["D"][f"block {size}, time relative to oBERT's recursion"] for size in sizes]
    rows = [[name, *(time[name] for time in times)] for name in times[0]]
    found["ablation-d-time"] = markdown(["time / oBERT's recursion", *head], rows)
    return found


def _claims(summary: dict[str, Any]) -> dict[str, str]:
    """What has no figure in the paper."""
    sizes = list(summary["bias"])
    kinds = (claims.AUXILIARY_LOSS, claims.SQUARED, "by sampling")
    bias = [[kind, *(summary["bias"][size][kind]["mean"] for size in sizes)] for kind in kinds]
    bias[-1][0] = "the same, from sampled minibatches"
    learned = [
        [f"{name}, Q₀ = {alpha} I", *found.values()]
        for name, key in (("isotropic u", "isotropic"), ("u a gradient", "gradient"))
        for alpha, found in summary[key].items()
    ]
    learned.append(["exact inverse", None, summary["exact"], 0.0])
    return {
        "claims-bias": markdown(
            ["distance of the optimum to F_γ⁻¹", *(f"{s} examples" for s in sizes)], bias
        ),
        "claims-learned": markdown(["full Q", "rate", "test MSE at 50 %", "distance to F_γ⁻¹"], learned),
    }


def _layer(summary: dict[str, Any]) -> dict[str, str]:
    """Structures of Q, KFAC, and Q after a pruning."""
    rows: list[list[Cell]] = [
        [name, found["learned"]["gap"], found["optimum"]["gap"], found["learned"]["distance"]]
        for name, found in summary["structures"].items()
    ]
    rows += [[name, found["gap"], None, found["distance"]] for name, found in summary["inverted"].items()]
    steps = list(summary["pruned"]["ours"]["refined"])
    pruned: list[list[Cell]] = [
        [
            f"{who}, {start}",
            found["right after"] if start == "refined" else None,
            *(found[start][step] for step in steps),
        ]
        for who, found in summary["pruned"].items()
        for start in layer.STARTS
    ]
    head = ["gap after so many auxiliary steps", "0", *steps]
    return {
        "layer-structures": markdown(
            ["Q of a real layer", "gap", "at the structure's optimum", "distance to F_γ⁻¹"], rows
        ),
        "layer-pruned": markdown(head, pruned),
    }


def _unstructured(name: str, summary: dict[str, Any]) -> dict[str, str]:
    """Accuracy by arm; what scorer and optimizer bring."""
    levels = list(next(iter(summary["after"].values())))
    crossed = summary.get("crossed_seeds", summary["seeds"])
    fewer = f", of the arms that the paper has not: {crossed}" if crossed != summary["seeds"] else ""
    head = f"test accuracy, % (dense {summary['dense']:.2f}; seeds: {summary['seeds']}{fewer})"
    found = {}
    for key, when in ((name, "after"), (f"{name}-before", "before")):
        seeds = {arm: crossed if arm in ARMS[3:] else summary["seeds"] for arm in summary[when]}
        rows = [
            [arm, *(_points(values[level], seeds[arm] > 1) for level in levels)]
            for arm, values in summary[when].items()
        ]
        found[key] = markdown([head, *levels], rows)
    if "parts" in summary:
        rows = [[part, *(_points(summary["parts"][level][part], crossed > 1) for level in levels)]
                for part in summary["parts"][levels[0]]]  # fmt: skip
        found[f"{name}-parts"] = markdown(["points gained by", *levels], rows)
    return found


def _semi_structured(name: str, summary: dict[str, Any]) -> dict[str, str]:
    """Accuracy by arm on the way to 2:4."""
    levels = list(next(iter(summary["after"].values())))
    titles = {"before": "pruned", "after": "trained"}
    rows = [
        [
            arm,
            *(
                _points(summary[when][arm][level], summary["seeds"] > 1)
                for level in levels
                for when in titles
            ),
        ]
        for arm in summary["after"]
    ]
    head = f"test accuracy, % (dense {summary['dense']:.2f}; seeds: {summary['seeds']})"
    shown = [*levels[:-1], "2:4"]
    return {
        name: markdown([head, *(f"{level}, {title}" for level in shown for title in titles.values())], rows)
    }


def _points(value: dict[str, Any], several: bool) -> str:
    """Percentage points to two places; the error where there are several seeds."""
    if value["mean"] is None:
        return "diverged"
    return f"{value['mean']:.2f}" + (f" ± {value['sem']:.2f}" if several else "")


def markdown(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table; numbers with three digits, means with their errors."""
    lines = [_line(head), _line(["---"] * len(head))]
    return "\n".join([*lines, *(_line([_cell(value) for value in row]) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "–"
    if isinstance(value, dict):
        if value["mean"] is None:
            return "–"
        return f"{_number(value['mean'])} ± {_number(value['sem'], 1 if value['sem'] < 1 else 2)}"
    return _number(value)


def _number(value: float, digits: int = 3) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    return f"{round(value):d}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def main(arguments: Sequence[str]) -> int:
    """Fill the tables of a document in place."""
    results, document = map(Path, arguments)
    filled = fill(document.read_text("utf-8"), results)
    write_atomically(document, filled.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
