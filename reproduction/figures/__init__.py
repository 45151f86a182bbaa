"""The paper's figures on problems whose Fisher matrix is known: each module has one `run`.

`run(out, smoke=…, progress=…)` writes NAME.json and NAME.png (or NAME-PANELS.png) and returns what the JSON
holds. A run that was interrupted goes on where it stopped; `smoke` takes the same path with a few steps.
"""
