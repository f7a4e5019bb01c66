"""Two gloo ranks: the same global batches as one rank, exact resume, and changes between one and two ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


def run_jobs(folder, jobs):
    """Runs fits on two ranks; returns for each job the results of both."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("ddp_jobs.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder / "jobs.json")],
            env={**environment, "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return {
        job["name"]: [json.loads((folder / job["name"] / f"rank{rank}.json").read_text()) for rank in range(2)]
        for job in jobs
    }


def global_batches(ranks):
    """(optimizer step, sample ids of all ranks) of each micro-batch."""
    return [(step, ids + other) for (step, ids), (_, other) in zip(ranks[0]["steps"], ranks[1]["steps"], strict=True)]


def flat(steps):
    return [index for _, ids in steps for index in ids]


@pytest.fixture
def data_arguments(corpus, data_cache):
    return {
        "source": str(corpus),
        "vocab_size": 300,
        "sequence_length": 64,
        "batch_size": 3,
        "val_fraction": 0.25,
        "cache_dir": data_cache,
    }


def test_ranks_share_one_order_and_resume_exactly(tmp_path, data_arguments, make_data, run_fit, save_everywhere):
    trainer = {"max_steps": 13, "accumulate_grad_batches": 2}
    first = run_jobs(
        tmp_path,
        [
            {"name": "unbroken", "data": data_arguments, "trainer": trainer},
            {"name": "switch", "data": data_arguments, "trainer": trainer, "switch_step": 6},
        ],
    )
    unbroken, saved = global_batches(first["unbroken"]), first["unbroken"][0]["saved"]
    # one rank with the batches of both sees the same global batches
    single = run_fit(make_data(batch_size=6), callbacks=[save_everywhere], **trainer)
    assert [[step, ids] for step, ids in unbroken] == [[step, ids] for step, ids in single.steps]
    # the same optimizer steps from one rank, the small batch and twice the accumulation
    wide = run_fit(make_data(batch_size=3), max_steps=13, accumulate_grad_batches=4)
    assert flat(unbroken) == flat(wide.steps)
    switched = global_batches(first["switch"])
    assert flat(switched)[:72] == flat(unbroken)[:72]
    assert all(index >= 32 for step, ids in switched if step >= 6 for index in ids)

    # validation: each sample on one rank only, none twice
    num_val = len(make_data()._val_datasets()[0])
    batches = -(-num_val // 6)
    seen = [index for rank in first["unbroken"] for ids in rank["validated"][:batches] for index in ids]
    assert sorted(index for index in seen if index >= 0) == list(range(num_val))

    jobs = [
        {"name": f"again{i}", "data": {**data_arguments, "num_workers": i % 3}, "trainer": trainer, "ckpt": path}
        for i, (path, _, _) in enumerate(saved[:: len(saved) // 4])
    ]
    jobs += [
        {"name": f"switch{i}", "data": data_arguments, "trainer": trainer, "switch_step": 6, "ckpt": path}
        for i, (path, _, _) in enumerate(first["switch"][0]["saved"][4:11:3])
    ]
    one_rank_saves = save_everywhere.saved[3::6]
    jobs += [
        {"name": f"grown{i}", "data": {**data_arguments, "batch_size": 6}, "trainer": trainer, "ckpt": str(path)}
        for i, (path, _, _) in enumerate(one_rank_saves)
    ]
    second = run_jobs(tmp_path, jobs)
    for i, (path, done, _) in enumerate(saved[:: len(saved) // 4]):
        assert global_batches(second[f"again{i}"]) == unbroken[done:], path
        assert second[f"again{i}"][0]["weight"] == first["unbroken"][0]["weight"], path
    for i, (path, done, _) in enumerate(first["switch"][0]["saved"][4:11:3]):
        assert global_batches(second[f"switch{i}"]) == switched[done:], path

    # from one rank to two (the global batch doubles) and from two to one (it halves)
    reference = flat(run_fit(make_data(batch_size=3), max_steps=100).steps)
    for i, (path, done, steps) in enumerate(one_rank_saves):
        resumed = global_batches(second[f"grown{i}"])
        assert flat(resumed) == reference[done * 6 :][: (13 - steps) * 24], path
        assert [step for step, _ in resumed] == [steps + j // 2 for j in range(2 * (13 - steps))], path
    for path, done, steps in saved[1::4]:
        resumed = run_fit(make_data(batch_size=3), ckpt_path=path, **trainer)
        assert flat(resumed.steps) == reference[done * 6 :][: (13 - steps) * 6], path


def test_ranks_that_build_the_cache_together(tmp_path, data_arguments):
    """No rank waits for ever, and both read the same tokens, with an empty cache on one file system."""
    arguments = {**data_arguments, "cache_dir": str(tmp_path / "fresh")}
    result = run_jobs(tmp_path, [{"name": "fresh", "data": arguments, "trainer": {"max_steps": 4}}])["fresh"]
    assert len(flat(global_batches(result))) == 24
    assert len(list((tmp_path / "fresh" / "tokens").glob("*/meta.json"))) == 1
    assert not list((tmp_path / "fresh").rglob("*.partial"))
