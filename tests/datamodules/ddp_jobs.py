"""One rank of a gloo job (LOCAL_RANK): runs the fits listed in the JSON file of its first argument, in turn."""

import json
import os
import sys
from pathlib import Path

import torch
from conftest import SaveEverywhere, fit

from fulgurite.datamodules.anneal import AnnealSwitch
from fulgurite.datamodules.text import TextDataModule


def main() -> None:
    torch.set_num_threads(1)
    jobs_file = Path(sys.argv[1])
    rank = os.environ["LOCAL_RANK"]
    for job in json.loads(jobs_file.read_text()):
        data = TextDataModule(**job["data"])
        if "switch_step" in job:
            data = AnnealSwitch(data, TextDataModule(**{**job["data"], "seed": 7}), job["switch_step"])
        folder = jobs_file.parent / job["name"]
        folder.mkdir(exist_ok=True)
        saver = SaveEverywhere(folder)
        module = fit(
            data,
            ckpt_path=job.get("ckpt"),
            callbacks=[saver],
            strategy="ddp_find_unused_parameters_false",
            **{"devices": 2, **job["trainer"]},
        )
        result = {"steps": module.steps, "validated": module.validated, "weight": module.weight.tolist()}
        result["saved"] = [(str(path), done, steps) for path, done, steps in saver.saved]
        (folder / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
