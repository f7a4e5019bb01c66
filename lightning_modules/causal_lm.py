"""CausalLMModule: any Hugging Face causal language model under Lightning, for every kind of token-level training.

What others may rely on (duck-typed, so that callbacks need no import):
    `model`            the Hugging Face model; this module's state dict is its state dict with the prefix `model.`
    `tokenizer`        tokenizer or None
    `tokens_seen`      int, input tokens of all ranks since the start of training, saved in checkpoints
    `validation_sums`  batch -> (3,) float64: summed loss in nats, target tokens, UTF-8 bytes of the targets
    `save_pretrained`  writes a Hugging Face directory, also from another state dict (merged weights)

Loss. The gradient of one optimizer step is that of the mean loss over the target tokens of the global batch: all
micro-batches of the accumulation window, all ranks, however the padding falls. Each micro-batch's backward uses its
summed loss over a fixed count N0; Lightning then divides by the accumulation length A and the strategy averages over R
ranks; before the optimizer step gradients are multiplied by

    N0 * A * R / (target tokens of the global batch)

in the same pass that clips them. When the data module says `uniform_token_count`, that factor is 1 in every full window
and follows from the number of rows in a short one: nothing is counted or communicated.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from .batch_accounting import GlobalBatch, Stopwatch, all_reduce_sum, utf8_bytes
from .building import build_model, decoder_layers, fsdp_wrap, rotary_buffers
from .cpu_training import speed_up_on_cpu
from .document_masks import attention_inputs
from .exporting import full_state_dict, huggingface_state_dict
from .model_sources import complete_source, load_config, load_tokenizer, resolve_model, weights_directory
from .optimizers import decay_groups, scale_and_clip_
from .schedules import check_schedule, get_schedule, needs_total_steps
from .throughput import flops_per_token, peak_flops
from .token_loss import IGNORE_INDEX, shift_targets, token_cross_entropy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HALF = {"bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16", "16-true": "float16"}


class CausalLMModule(LightningModule):
    """A causal LM with token-weighted loss, AdamW, a schedule, meta-device set-up and Hugging Face export.

    Batches are dictionaries: `input_ids` (B, T) int64; `labels` (B, T) int64 aligned with them, -100 where there is no
    target (the shift by one happens here); optional `attention_mask` (B, T); optional `position_ids` (B, T) that
    restart at 0 with each document, which then does not see the others.

    Args:
        model: Hugging Face config as a dictionary (`model_type` and its fields; weights are drawn; without
            `vocab_size`, the tokenizer's), a model directory, a hub id, or a `.gguf` file.
        tokenizer: directory or hub id, or a tokenizer object; default: the data module's, else the model's own.
        learning_rate: peak of the schedule.
        schedule: "constant", "warmup_stable", "wsd", "cosine", "linear", "1-sqrt" or "inverse_sqrt".
        warmup_steps: optimizer steps of linear warmup.
        decay_steps: optimizer steps of WSD's decay.
        decay_type: its shape: "1-sqrt", "linear", "cosine" or "exponential".
        min_lr_ratio: where a decay ends, as a fraction of `learning_rate`.
        weight_decay: AdamW's; norms and biases have none.
        decay_embeddings: whether embedding tables have it.
        betas: AdamW's.
        eps: AdamW's.
        z_loss: coefficient of the squared log-partition, for example 1e-4.
        activation_checkpointing: recompute each decoder layer in backward instead of keeping its activations.
        compile: `torch.compile` each decoder layer, in place.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...; None lets transformers choose.
        dtype: of the parameters, "float32" or "bfloat16"; None: what the trainer's precision says, else float32.
        init_seed: of the drawn weights; None: the run's `seed_everything`, else 0.

    Raises:
        ValueError: a value is wrong; the message names it and the mend.
    """

    hparams: Any  # Lightning's own annotation has no attributes

    def __init__(
        self,
        model: dict[str, Any] | str,
        *,
        tokenizer: Any = None,
        learning_rate: float = 3e-4,
        schedule: str = "cosine",
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        decay_type: str = "1-sqrt",
        min_lr_ratio: float = 0.0,
        weight_decay: float = 0.1,
        decay_embeddings: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        z_loss: float = 0.0,
        activation_checkpointing: bool = False,
        compile: bool = False,
        attn_implementation: str | None = None,
        dtype: str | None = None,
        init_seed: int | None = None,
    ) -> None:
        super().__init__()
        # A tokenizer object is no hyper-parameter, and would not load with weights_only.
        self.save_hyperparameters(ignore=[] if tokenizer is None or isinstance(tokenizer, str) else ["tokenizer"])
        self._check_hyperparameters()
        self._source = resolve_model(model)
        self.tokenizer: PreTrainedTokenizerBase | None = None if isinstance(tokenizer, str) else tokenizer
        self.model: PreTrainedModel = None  # type: ignore[assignment]
        self.token_byte_lengths: Tensor | None = None
        self._tokens_seen: int | Tensor = 0
        self._uniform = False
        self._nominal = (0, 0)  # target tokens (N0) and rows of a micro-batch, as rank 0's first one has them
        self._batch_checked = False
        self._batch = GlobalBatch()
        self._stepped = False
        self._grad_norm: Tensor | None = None
        self._learning_rate = 0.0
        self._watch = Stopwatch()
        self._logged_tokens = 0
        self._peak_flops: float | None = None
        self._validation_totals: Tensor | None = None

    def _check_hyperparameters(self) -> None:
        h = self.hparams
        if not h.learning_rate > 0:
            raise ValueError(f"learning_rate={h.learning_rate} must be positive")
        if h.weight_decay < 0:
            raise ValueError(f"weight_decay={h.weight_decay} is negative; use 0 for none")
        if len(h.betas) != 2 or not all(0 <= beta < 1 for beta in h.betas):
            raise ValueError(f"betas={h.betas} must be two numbers in [0, 1), for example [0.9, 0.95]")
        if not h.eps > 0:
            raise ValueError(f"eps={h.eps} must be positive, for example 1e-8")
        if h.z_loss < 0:
            raise ValueError(f"z_loss={h.z_loss} is negative; use 0 for none, 1e-4 as in PaLM")
        if h.dtype is not None and h.dtype not in _DTYPES:
            raise ValueError(f"dtype={h.dtype!r} is unknown; use one of {', '.join(_DTYPES)}")
        check_schedule(h.schedule, **self._schedule_arguments())

    def _schedule_arguments(self) -> dict[str, Any]:
        names = ("warmup_steps", "decay_steps", "decay_type", "min_lr_ratio")
        return {name: self.hparams[name] for name in names}

    # ---------------------------------------------------------------- set-up

    def prepare_data(self) -> None:
        """Converts a GGUF file, once a node, before the other ranks look for the result."""
        weights_directory(self._source)

    def setup(self, stage: str) -> None:
        """Takes the tokenizer and checks what the run's own settings decide, before anything large is built."""
        strategy = self.trainer.strategy
        if isinstance(strategy, FSDPStrategy | DeepSpeedStrategy):
            raise ValueError(
                f"strategy {type(strategy).__name__} is not supported; use ModelParallelStrategy (FSDP2) with"
                " data_parallel_size = number of devices and tensor_parallel_size = 1"
            )
        if stage == "fit" and self.trainer.max_steps > 0:
            check_schedule(self.hparams.schedule, **self._schedule_arguments(), total_steps=self.trainer.max_steps)
        datamodule = getattr(self.trainer, "datamodule", None)
        if self.tokenizer is None and self.hparams.get("tokenizer") is None:
            self.tokenizer = getattr(datamodule, "tokenizer", None)
        self.token_byte_lengths = getattr(datamodule, "token_byte_lengths", None)
        self._uniform = bool(getattr(datamodule, "uniform_token_count", False))

    def configure_model(self) -> None:
        """Builds the model, sharded under `ModelParallelStrategy`. Does nothing the second time."""
        if self.model is not None:
            return
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self._source, self.hparams.get("tokenizer"))
        self._source = complete_source(self._source, self.tokenizer)
        if self._source.kind == "config":
            self.hparams["model"] = self._source.value  # a checkpoint rebuilds the same model without the data module
        trainer = self._trainer
        precision = str(trainer.precision_plugin.precision) if trainer is not None else "32-true"
        half = _HALF.get(precision)
        dtype = self.hparams.dtype or (half if half and precision.endswith("true") else "float32")
        mesh = self._data_parallel_mesh()
        device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
        seed = self.hparams.init_seed
        self.model = build_model(
            self._source,
            load_config(self._source),
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed,
            dtype=_DTYPES[dtype],
            device=device,
            attn_implementation=self.hparams.attn_implementation,
            wrap=None if mesh is None else fsdp_wrap(mesh, _DTYPES[half] if half else None),
        )
        if self.hparams.activation_checkpointing:
            renamed = getattr(self.model, "activation_checkpointing_enable", None)  # transformers 5.24
            (renamed or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
        if device.type == "cpu" and precision == "bf16-mixed":
            speed_up_on_cpu(
                self.model,
                attention=self.hparams.attn_implementation is None,
                norms=not self.hparams.compile,  # a compiler fuses their passes itself
            )
        if self.hparams.compile:
            for layer in decoder_layers(self.model).values():
                layer.compile()

    def _data_parallel_mesh(self) -> "DeviceMesh | None":
        if self._trainer is None or not isinstance(self._trainer.strategy, ModelParallelStrategy):
            return None
        mesh = self.device_mesh
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            raise ValueError(
                f"tensor_parallel_size={mesh['tensor_parallel'].size()} is not supported: set"
                " ModelParallelStrategy(data_parallel_size=<all devices>, tensor_parallel_size=1)"
            )
        return mesh["data_parallel"]

    def to(self, *args: Any, **kwargs: Any) -> "CausalLMModule":
        """As `Module.to`, but rotary tables stay float32: bf16-true would round their frequencies."""
        kept = list(rotary_buffers(self.model)) if self.model is not None else []
        super().to(*args, **kwargs)
        for module, name, buffer in kept:
            moved = module._buffers[name]
            assert moved is not None
            if moved.dtype != torch.float32:
                module._buffers[name] = buffer.to(moved.device)
        return self

    def configure_optimizers(self) -> Any:
        """AdamW (fused where the device has it) and the schedule, stepped once an optimizer step."""
        h = self.hparams
        groups = decay_groups(self.model, h.weight_decay, decay_embeddings=h.decay_embeddings)
        fused = self.device.type in ("cuda", "cpu")
        optimizer = torch.optim.AdamW(groups, lr=h.learning_rate, betas=tuple(h.betas), eps=h.eps, fused=fused)
        total_steps = None
        if needs_total_steps(h.schedule):
            estimate = self.trainer.estimated_stepping_batches
            total_steps = -1 if math.isinf(estimate) else int(estimate)
        schedule = get_schedule(h.schedule, optimizer, **self._schedule_arguments(), total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---------------------------------------------------------------- training

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, V)."""
        inputs = attention_inputs(input_ids, attention_mask, position_ids, self.model.config._attn_implementation)
        logits = self.model(**inputs, use_cache=False).logits
        return logits.view(*input_ids.shape, -1)

    def _batch_logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of a micro-batch, in nats a token: summed over its targets, divided by N0 (module docstring)."""
        targets = shift_targets(batch["labels"])
        if not self._batch_checked:
            self._check_first_batch(batch, targets)
        loss, z = token_cross_entropy(self._batch_logits(batch), targets, z_loss=self.hparams.z_loss)
        self._batch.add(
            batch["input_ids"],
            batch.get("attention_mask"),
            [
                loss.detach() - self.hparams.z_loss * z,
                (targets != IGNORE_INDEX).sum(),
                utf8_bytes(targets, self._byte_lengths(targets.device)),
                z,
            ],
        )
        return loss / self._nominal[0]

    def _check_first_batch(self, batch: Mapping[str, Tensor], targets: Tensor) -> None:
        """Looks at the first batch: refuses what would fail later with an index error, and agrees on N0."""
        config = self.model.config.get_text_config()
        largest, length = int(batch["input_ids"].max()), batch["input_ids"].shape[1]
        if largest >= config.vocab_size:
            raise ValueError(
                f"token id {largest} is outside the model's vocab_size={config.vocab_size}: the data were tokenised"
                " with another tokenizer"
            )
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ValueError(
                f"sequences of {length} tokens exceed the model's max_position_embeddings={limit}: raise it in the"
                " model's config or lower data.sequence_length"
            )
        self._batch_checked = True
        if not self._nominal[0]:
            count = (max(int((targets != IGNORE_INDEX).sum()), 1), len(targets))
            num_targets, num_rows = self.trainer.strategy.broadcast(count)
            self._nominal = (num_targets, num_rows)

    def _byte_lengths(self, device: torch.device) -> Tensor | None:
        if self.token_byte_lengths is not None and self.token_byte_lengths.device != device:
            self.token_byte_lengths = self.token_byte_lengths.to(device)
        return self.token_byte_lengths

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Makes the gradient that of the mean over the global batch's tokens, and clips it, in one pass."""
        trainer, (nominal_tokens, nominal_rows) = self.trainer, self._nominal
        factor: float | Tensor
        if self._uniform:
            factor = nominal_rows * trainer.accumulate_grad_batches / self._batch.rows
            self._tokens_seen += self._batch.tokens * trainer.world_size
        else:
            sums = self._batch.reduce()
            scale = nominal_tokens * trainer.accumulate_grad_batches * trainer.world_size
            factor = (scale / sums[GlobalBatch.TARGETS].clamp(min=1)).float()
            self._tokens_seen = self._tokens_seen + sums[GlobalBatch.TOKENS]
        by_value = gradient_clip_algorithm == "value"
        clip = gradient_clip_val or None
        self._grad_norm = scale_and_clip_(
            (parameter for group in optimizer.param_groups for parameter in group["params"]),
            factor=factor,
            max_norm=None if by_value else clip,
            max_value=clip if by_value else None,
            need_norm=self._is_log_step(),
        )
        self._learning_rate = float(optimizer.param_groups[0]["lr"])
        self._stepped = True

    def _is_log_step(self) -> bool:
        trainer: Any = self.trainer
        return bool(trainer._logger_connector.should_update_logs or trainer.fast_dev_run)

    def on_train_start(self) -> None:
        """Starts the clock."""
        self._batch.clear()
        self._batch_checked = False
        half = _HALF.get(str(self.trainer.precision_plugin.precision))
        self._peak_flops = peak_flops(self.device, _DTYPES[half] if half else torch.float32)
        self._logged_tokens = self.tokens_seen
        self._watch.start()

    def on_train_batch_end(self, outputs: Any, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Logs the global batch at the trainer's log interval: the only place where training waits for the device."""
        if not self._stepped:
            return
        self._stepped = False
        if self._is_log_step():
            self._log_global_batch(batch["input_ids"].shape[1])
        self._batch.clear()

    def _log_global_batch(self, sequence_length: int) -> None:
        loss_sum, targets, _, num_bytes, z_sum = self._batch.reduce().tolist()
        loss = loss_sum / max(targets, 1.0)
        tokens = self.tokens_seen
        tokens_per_second = (tokens - self._logged_tokens) / self._watch.lap()
        self._logged_tokens = tokens
        self.log_dict({"train_loss": loss, "tokens_per_second": tokens_per_second}, prog_bar=True)
        metrics: dict[str, float | Tensor] = {
            "train_ppl": _perplexity(loss),
            "lr": self._learning_rate,
            "tokens_seen": torch.tensor(tokens, dtype=torch.float64),
        }
        if num_bytes:
            metrics["train_bpb"] = loss_sum / (math.log(2) * num_bytes)
        if self.hparams.z_loss:
            metrics["z_loss"] = self.hparams.z_loss * z_sum / max(targets, 1.0)
        if self._grad_norm is not None:
            metrics["grad_norm"] = self._grad_norm
        if self._peak_flops is not None:
            flops = tokens_per_second * flops_per_token(self.model, sequence_length)
            metrics["mfu"] = flops / (self._peak_flops * self.trainer.world_size)
        self.log_dict(metrics)

    @property
    def tokens_seen(self) -> int:
        """Input tokens (without padding) of all ranks since the start of training."""
        return int(self._tokens_seen)

    # ---------------------------------------------------------------- validation

    def validation_sums(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(3,) float64: summed loss in nats over target tokens, their number, their UTF-8 bytes (0 if unknown)."""
        targets = shift_targets(batch["labels"])
        precision = nullcontext() if self._trainer is None else self._trainer.precision_plugin.val_step_context()
        with torch.no_grad(), precision:
            loss, _ = token_cross_entropy(self._batch_logits(batch), targets)
        count = (targets != IGNORE_INDEX).sum()
        num_bytes = utf8_bytes(targets, self._byte_lengths(targets.device))
        return torch.stack((loss.double(), count.double(), num_bytes))

    def on_validation_start(self) -> None:
        """Stops the clock of tokens a second."""
        self._watch.pause()

    def on_validation_end(self) -> None:
        """Lets it run on."""
        self._watch.resume()

    def on_validation_epoch_start(self) -> None:
        """Starts new sums."""
        self._validation_totals = None

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Adds a batch to the sums; returns its mean loss."""
        sums = self.validation_sums(batch)
        self._validation_totals = sums if self._validation_totals is None else self._validation_totals + sums
        return sums[0] / sums[1].clamp(min=1)

    def on_validation_epoch_end(self) -> None:
        """Logs the mean over all tokens of all ranks' validation batches (not a mean of means)."""
        if self._validation_totals is None:
            return
        loss_sum, targets, num_bytes = all_reduce_sum(self._validation_totals).tolist()
        if targets == 0:
            raise ValueError("the validation set holds no target token: every label is -100")
        loss = loss_sum / targets
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_ppl", _perplexity(loss), sync_dist=True)
        if num_bytes:
            self.log("val_bpb", loss_sum / (math.log(2) * num_bytes), sync_dist=True)

    # ---------------------------------------------------------------- saving

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the counts and the full Hugging Face config (primitives only)."""
        checkpoint["causal_lm"] = {
            "tokens_seen": self.tokens_seen,
            "nominal": list(self._nominal),
            "config": json.loads(self.model.config.to_json_string(use_diff=False)),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the counts."""
        state = checkpoint.get("causal_lm")
        if state is not None:
            self._tokens_seen = state["tokens_seen"]
            self._nominal = tuple(state["nominal"])

    def save_pretrained(self, directory: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Writes a Hugging Face directory: safetensors, config, generation config, tokenizer. Ties stay ties.

        Under a sharding strategy every rank must call it; rank 0 writes.

        Args:
            directory: is created.
            state_dict: weights to write instead of the model's, with Hugging Face keys or the prefix `model.`.

        Raises:
            ValueError: `state_dict` has keys too many or too few, or tied tensors that differ.
        """
        weights = full_state_dict(self.model) if state_dict is None else state_dict
        if self._trainer is not None and not self._trainer.is_global_zero:
            return
        self.model.save_pretrained(directory, state_dict=huggingface_state_dict(self.model, weights))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
