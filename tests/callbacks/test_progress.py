"""Progress: plain lines in a log file, a live bar on a terminal, numbers that are right."""

import importlib.util
import multiprocessing
import os
import pty
import re
import time
from pathlib import Path

import pytest
import torch

from fulgurite.callbacks import progress
from fulgurite.callbacks.progress import ThroughputProgressBar, format_seconds

_spec = importlib.util.spec_from_file_location("tiny_run", Path(__file__).with_name("tiny_run.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


def fit(root, bar, module=None, callbacks=(), **kwargs):
    settings = {"enable_progress_bar": True, "max_steps": 8, "val_check_interval": 4, "check_val_every_n_epoch": None}
    trainer = tiny.make_trainer(root, [bar, *callbacks], **{**settings, **kwargs})
    trainer.fit(module or tiny.TinyModule(), datamodule=tiny.TinyData())
    return trainer


def test_lines_in_a_log_file(tmp_path, capsys):
    fit(tmp_path, ThroughputProgressBar(line_seconds=1e-9))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training from step 0 to 8"
    assert [line.split(",")[0] for line in lines if line.startswith("step ") and "/8," in line] == [
        *(f"step {step}/8" for step in range(1, 9)),
        "step 8/8",  # the last one again, at the end
    ]
    number = r"\d+\.\d{4}"
    assert re.fullmatch(rf"step 3/8, loss {number}, [\d.]+k? tokens/s, ETA 0:0\d", lines[3])
    assert re.fullmatch(rf"step 4: val_loss {number}", next(line for line in lines if line.startswith("step 4: val_l")))
    assert "step 4: validation batch 2/4" in lines
    assert re.fullmatch(rf"step 8/8, loss {number}, [\d.]+k? tokens/s, val_loss {number}, ETA 0:00", lines[-1])


def test_lines_are_rare(tmp_path, capsys):
    fit(tmp_path, ThroughputProgressBar(line_seconds=3600))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0].split(" val")[0] for line in lines] == [
        "training from step 0 to 8",
        "step 4:",
        "step 8:",
        "step 8/8",
    ]


def test_merged_loss_is_shown_though_it_is_measured_after_validation(tmp_path, capsys):
    class Merge(progress.pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.callback_metrics["val_loss_merged"] = torch.tensor(0.125)

    fit(tmp_path, ThroughputProgressBar(line_seconds=3600), callbacks=[Merge()])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 4: val_loss \d+\.\d{4}, val_loss_merged 0\.1250", lines[1])
    assert ", val_loss_merged 0.1250, " in lines[-1]


def test_tokens_and_eta_follow_the_clock(tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    class Ticks(tiny.TinyModule):
        def on_train_batch_start(self, batch, batch_idx):
            clock[0] += 2.0  # a batch is 4 x 8 tokens

    fit(tmp_path, ThroughputProgressBar(line_seconds=2), module=Ticks(), accumulate_grad_batches=2, limit_val_batches=0)
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("step 5/8"))
    assert line.endswith("16 tokens/s, ETA 0:12")  # 3 steps of 2 batches of 2 s


def test_a_module_that_logs_its_own_rate_is_believed(tmp_path, capsys):
    class Rated(tiny.TinyModule):
        def training_step(self, batch, batch_idx):
            self.log("tokens_per_second", 1234567.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    fit(tmp_path, ThroughputProgressBar(line_seconds=3600), module=Rated())
    assert "1.23M tokens/s" in capsys.readouterr().out


def test_without_an_end_there_is_no_eta(tmp_path, capsys):
    class Stops(progress.pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 3

    fit(tmp_path, ThroughputProgressBar(line_seconds=1e-9), callbacks=[Stops()], max_steps=-1, max_epochs=-1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training from step 0 to the end"
    assert [line for line in lines if "ETA" in line] == []
    assert lines[-1].startswith("step 3, loss ")


def test_epochs_give_an_end_too(tmp_path, capsys):
    fit(tmp_path, ThroughputProgressBar(line_seconds=3600), max_steps=-1, max_epochs=2, limit_train_batches=5)
    assert capsys.readouterr().out.splitlines()[0] == "training from step 0 to 10"


def test_other_ranks_are_silent(tmp_path, capsys):
    bar = ThroughputProgressBar(line_seconds=1e-9)
    bar.disable()
    fit(tmp_path, bar)
    assert capsys.readouterr().out == ""


def _on_terminal(root, descriptor):
    for target in (0, 1, 2):
        os.dup2(descriptor, target)
    import sys

    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"}
    progress._TERMINAL_SECONDS = 0.05
    fit(root, ThroughputProgressBar(), module=tiny.TinyModule(sleep=0.1, val_sleep=0.3))


def test_bar_on_a_terminal(tmp_path):
    master, slave = pty.openpty()
    process = multiprocessing.get_context("fork").Process(target=_on_terminal, args=(tmp_path, slave))
    process.start()
    os.close(slave)
    output, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            output += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
    process.join(10)
    assert process.exitcode == 0, output
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert re.search(r"training .*8/8.*loss \d+\.\d{4}  [\d.]+k? tokens/s  val_loss \d+\.\d{4}  ETA 0:00", text)
    assert re.search(r"validation .*[1-3]/4", text)
    assert re.search(r"step 4: val_loss \d+\.\d{4}", text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3725, "1:02:05"), (90061, "1d 1:01:01"), (86400, "1d 0:00:00")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_wrong_period():
    with pytest.raises(ValueError, match=r"line_seconds=0\): must be positive"):
        ThroughputProgressBar(line_seconds=0)
