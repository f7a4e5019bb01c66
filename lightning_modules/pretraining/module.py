"""PretrainingModule: CausalLMModule with the defaults of pretraining from random weights."""

from typing import Any

from ..causal_lm import CausalLMModule


class PretrainingModule(CausalLMModule):
    """Pretrains a causal LM; the schedule is one argument.

    "warmup_stable" (the default) holds the peak for ever and leaves the annealing to checkpoint merging (WSM, arXiv
    2507.17634); "wsd", "cosine", "linear" and "1-sqrt" decay towards the end of the run. Defaults are the paper's:
    AdamW (0.9, 0.95), weight decay 0.1, with `gradient_clip_val=1.0` in the trainer.

    Args:
        model: as in `CausalLMModule`.
        learning_rate: peak of the schedule.
        schedule: its name.
        warmup_steps: optimizer steps of linear warmup.
        kwargs: as in `CausalLMModule`.
    """

    def __init__(
        self,
        model: dict[str, Any] | str,
        *,
        learning_rate: float = 4.78e-4,
        schedule: str = "warmup_stable",
        warmup_steps: int = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, learning_rate=learning_rate, schedule=schedule, warmup_steps=warmup_steps, **kwargs)
