"""What ranks share."""

from types import SimpleNamespace

import pytest

from fulgurite.callbacks.checkpoint_merging.live import on_rank_zero


class Ranks:
    """Two ranks one after the other: rank 1 receives what rank 0 broadcast."""

    def trainer(self, rank):
        return SimpleNamespace(is_global_zero=rank == 0, strategy=SimpleNamespace(broadcast=self.broadcast))

    def broadcast(self, value):
        if not hasattr(self, "sent"):
            self.sent = value
        return self.sent


@pytest.mark.parametrize(
    ("failure", "elsewhere"),
    [
        (OSError(28, "No space left"), OSError),
        (FileExistsError("merged exists"), OSError),
        (KeyError("model.weight"), RuntimeError),
        (ValueError("no tokenizer"), RuntimeError),
    ],
)
def test_any_failure_on_rank_zero_is_raised_on_every_rank(failure, elsewhere):
    ranks = Ranks()

    def fail():
        raise failure

    with pytest.raises(type(failure)) as first:
        on_rank_zero(ranks.trainer(0), fail)
    assert first.value is failure
    with pytest.raises(elsewhere) as second:
        on_rank_zero(ranks.trainer(1), fail)
    assert str(second.value) == f"rank 0 failed with {type(failure).__name__}: {failure}"


def test_success_on_rank_zero_runs_once():
    ranks, calls = Ranks(), []
    for rank in (0, 1):
        on_rank_zero(ranks.trainer(rank), lambda rank=rank: calls.append(rank))
    assert calls == [0]
