"""Tables of the figures with known Fisher matrices: init, estimation, ablation, claims, layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reproduction.figures import ablation, claims, estimation, init, layer
from reproduction.figures.ablation import shared
from reproduction.figures.estimation import arms
from reproduction.harness import Cell, markdown


def figure_tables(results: Path) -> dict[str, str]:
    """Every table by name, as Markdown."""
    records = {
        name: json.loads((results / f"{name}.json").read_text("utf-8"))
        for name in (init.NAME, estimation.NAME, ablation.NAME, claims.NAME, layer.NAME)
    }
    return {
        **_init(records["init"]),
        **_estimation(records["estimation"]["summary"]),
        **_ablation(records["ablation"]),
        **_claims(records["claims"]["summary"]),
        **_layer(records["layer"]["summary"]),
    }


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
    shown = (
        arms.BASELINE,
        arms.ISOTROPIC,
        arms.OURS,
        arms.AIMED,
        arms.OURS_AIMED,
        "limit: isotropic optimum",
        "limit: aimed optimum",
        "limit: least aimed error",
    )
    found = {"estimation-a": markdown(["full Q", *times], full)}
    for kind in ("aimed", "isotropic"):
        rows = [[arm, *(summary[s][arm][f"{kind} error"] for s in arms.PANELS)] for arm in shown]
        found[f"estimation-{kind}"] = markdown([f"{kind} error", *arms.PANELS], rows)
    same = [
        [arm, *(summary[s][arm]["from approximate-then-invert"] for s in arms.PANELS)]
        for arm in (arms.ISOTROPIC, arms.OURS, arms.AIMED, arms.OURS_AIMED)
    ]
    found["estimation-same"] = markdown(["relative Frobenius distance", *arms.PANELS], same)
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
        rows = [
            [arm, *(summary["D"][f"block {size}, {arm}"][kind] for size in sizes)]
            for arm in shared.BLOCK_ARMS
        ]
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
