"""AnnealSwitch: the corpus changes at the exact optimizer step, and each corpus goes on where it stopped."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from fulgurite.datamodules.anneal import AnnealSwitch
from fulgurite.datamodules.sampler import SampleStream


@pytest.fixture
def second_corpus(tmp_path):
    path = tmp_path / "second.jsonl"
    path.write_text("".join(json.dumps({"text": f"glass number {i} " * 12}) + "\n" for i in range(20)))
    return str(path)


@pytest.fixture
def make_switch(make_data, second_corpus):
    def make(switch_step, **arguments):
        main = make_data(**arguments)
        anneal = make_data(source=second_corpus, seed=7, **arguments)
        return AnnealSwitch(main, anneal, switch_step)

    return make


def check_order(data, steps, switch_step):
    """Every micro-batch of steps before the switch comes from main, every later one from anneal, both in order."""
    num_main = len(data.main.train_dataset)
    main = [index for step, ids in steps if step < switch_step for index in ids]
    anneal = [index for step, ids in steps if step >= switch_step for index in ids]
    assert main == SampleStream(num_main, 0)(torch.arange(len(main)).numpy()).tolist()
    offsets = SampleStream(len(data.anneal.train_dataset), 7)(torch.arange(len(anneal)).numpy())
    assert anneal == (num_main + offsets).tolist()


@pytest.mark.parametrize("switch_step", [0, 1, 7, 8, 9, 19, 20, 21])
@pytest.mark.parametrize(("accumulation", "num_workers"), [(1, 0), (2, 2), (3, 0)])
def test_switch_is_exact(make_switch, run_fit, switch_step, accumulation, num_workers):
    data = make_switch(switch_step, num_workers=num_workers)
    module = run_fit(data, max_steps=20, accumulate_grad_batches=accumulation, limit_val_batches=0)
    assert len(module.steps) == 20 * accumulation
    check_order(data, module.steps, switch_step)


def test_partial_last_step_of_a_limited_epoch(make_switch, run_fit):
    """Lightning also steps on an epoch's last batch: 5 batches at 2 a step are 3 optimizer steps."""
    data = make_switch(7)
    module = run_fit(data, max_epochs=4, accumulate_grad_batches=2, limit_train_batches=5, limit_val_batches=0)
    assert [step for step, _ in module.steps] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 6, 6, 7, 7, 8, 9, 9, 10, 10, 11]
    check_order(data, module.steps, 7)


def test_accumulation_that_changes_with_the_epoch(make_switch, run_fit):
    data = make_switch(20)
    scheduler = GradientAccumulationScheduler(scheduling={0: 1, 1: 4})
    module = run_fit(data, max_epochs=4, callbacks=[scheduler], limit_val_batches=0)
    assert max(step for step, _ in module.steps) > 20
    check_order(data, module.steps, 20)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("switch_step", [5, 8, 16])
def test_resume_before_at_and_after_the_switch(make_switch, run_fit, save_everywhere, switch_step, accumulation):
    arguments = {"max_steps": 20, "accumulate_grad_batches": accumulation}
    unbroken = run_fit(make_switch(switch_step), callbacks=[save_everywhere], **arguments)
    for path, done, _ in save_everywhere.saved[::2]:
        resumed = run_fit(make_switch(switch_step), ckpt_path=path, **arguments)
        assert resumed.steps == unbroken.steps[done:], path.stem
        assert resumed.weight.tolist() == unbroken.weight.tolist(), path.stem


def test_resume_with_another_batch_size_keeps_both_positions(make_switch, run_fit, save_everywhere):
    run_fit(make_switch(6), callbacks=[save_everywhere], max_steps=12, limit_val_batches=0)
    num_main = len(make_switch(6).main._train_streams()[0][0])
    for path, done, steps in save_everywhere.saved:
        data = make_switch(6, batch_size=4)
        resumed = run_fit(data, ckpt_path=path, max_steps=14, limit_val_batches=0)
        main = [i for _, ids in resumed.steps for i in ids if i < num_main]
        anneal = [i - num_main for _, ids in resumed.steps for i in ids if i >= num_main]
        start = 2 * min(done, 6)
        assert main == SampleStream(num_main, 0)(start + torch.arange(4 * max(0, 6 - steps)).numpy()).tolist()
        start = 2 * max(0, done - 6)
        expected = SampleStream(len(data.anneal.train_dataset), 7)(start + torch.arange(len(anneal)).numpy())
        assert anneal == expected.tolist()
        assert len(anneal) == 4 * (14 - max(6, steps))


def test_a_run_on_main_alone_can_be_annealed_later(make_data, make_switch, run_fit, save_everywhere):
    run_fit(make_data(), callbacks=[save_everywhere], max_steps=10, limit_val_batches=0)
    whole = run_fit(make_switch(10), max_steps=20, limit_val_batches=0)
    resumed = run_fit(make_switch(10), ckpt_path=save_everywhere.saved[-1][0], max_steps=20, limit_val_batches=0)
    assert resumed.steps == whole.steps[10:]


def test_attributes_come_from_both(make_switch, make_data):
    data = make_switch(5)
    data.prepare_data()
    data.setup()
    assert data.tokenizer is data.main.tokenizer
    assert data.anneal.fingerprints["tokenizer"] == data.fingerprints["tokenizer"]
    assert torch.equal(data.token_byte_lengths, data.main.token_byte_lengths)
    assert data.fingerprints["main_dataset"] == data.main.fingerprints["dataset"]
    assert data.fingerprints["anneal_dataset"] == data.anneal.fingerprints["dataset"]
    assert data.fingerprints["dataset"] not in (data.fingerprints["main_dataset"], data.fingerprints["anneal_dataset"])
    assert "from step 5" in data.fingerprints["source"]
    assert all(isinstance(value, str) for value in data.fingerprints.values())
    assert data.uniform_token_count
    assert not make_switch(5, document_masking=True).uniform_token_count
    mixed = AnnealSwitch(make_data(), make_data(sequence_length=32), 5)
    assert not mixed.uniform_token_count


def test_longer_sequences_after_the_switch(make_data, run_fit):
    data = AnnealSwitch(make_data(), make_data(sequence_length=96), 2)
    data.setup()
    shapes = {index: data.train_dataloader().dataset.__getitems__([index])["input_ids"].shape for index in (0, 40)}
    assert shapes == {0: (1, 64), 40: (1, 96)}


def test_validation_of_both(make_data, second_corpus, run_fit):
    data = AnnealSwitch(make_data(), make_data(source=second_corpus), 2, validate_anneal=True)
    module = run_fit(data, max_steps=3, val_check_interval=3)
    main, anneal = len(data.main.val_dataset), len(data.anneal.val_dataset)
    seen = [index for ids in module.validated for index in ids if index >= 0]
    assert seen == [*range(main), *range(anneal)]


def test_errors(make_data, second_corpus, tmp_path):
    with pytest.raises(ValueError, match="switch_step=-1"):
        AnnealSwitch(make_data(), make_data(), -1)
    with pytest.raises(ValueError, match=r"anneal.batch_size=4 differs from main.batch_size=2"):
        AnnealSwitch(make_data(), make_data(batch_size=4), 5)
    other = make_data(source=second_corpus, vocab_size=280)
    other.setup()
    other.tokenizer.save_pretrained(tmp_path / "other")
    data = AnnealSwitch(make_data(), make_data(source=second_corpus, tokenizer=str(tmp_path / "other")), 5)
    with pytest.raises(ValueError, match=r"main and anneal have different tokenizers .*leave out anneal\.tokenizer"):
        data.setup()
