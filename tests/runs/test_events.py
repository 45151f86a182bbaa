"""Events of a run in files and in trackers."""

import sys
import types
from importlib.machinery import ModuleSpec

from small_runs import go


def test_trackers_receive_the_same_events(tmp_path, monkeypatch):
    """Weights & Biases through its own names, of which only three are used."""
    heard = []

    class Fake:
        def log(self, values):
            heard.append(values)

        def finish(self):
            heard.append("finished")

    module = types.ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = lambda **options: heard.append(options) or Fake()
    monkeypatch.setitem(sys.modules, "wandb", module)
    run, _ = go(tmp_path, sparsity=0.5, stages=1, wandb="my-project")
    assert heard[0]["project"] == "my-project"
    assert heard[0]["config"]["schedule"]["sparsity"] == 0.5
    assert heard[-1] == "finished"
    stages = [values for values in heard[1:-1] if "stage/metric" in values]
    assert stages[0]["stage/sparsity"] == run.surgeon.sparsity
