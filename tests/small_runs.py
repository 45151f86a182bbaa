"""Short runs on the small model of killing.py."""

from pathlib import Path

from fishleg import runs
from fishleg.runs.recipe import make_recipe

QUICK_RUN = {
    "model": "killing:make_model",
    "data": "killing:loader",
    "samples": 16,
    "sub_batch": 8,
    "stages": 3,
}


def go(tmp_path: Path, **options):
    run = runs.start(make_recipe(QUICK_RUN, {"out": "run"}, options), base=tmp_path)
    return run, run.execute()
