"""WSM while training runs: the merge of the checkpoints so far, kept up to date as each one comes.

    anytime   one accumulator, window grows without end:  acc <- acc + b (theta_k - acc)
              polynomial(p) on virtual_end has c_j ~ (j+1)^p - j^p whatever n, so b = 1 - (k / (k+1))^p is exact at
              every k (p = 1: linear = the mean; p = 1/2: one_minus_sqrt); ema: b = 1 - beta; wma: b = 2 / (k + 2)
    fixed     one accumulator, any curve, start and number known beforehand, valid only at the end
    sliding   ring buffer of the last n, any curve, valid at every k

Under FSDP2 / tensor parallelism each rank merges its own shards (a merge is linear): no communication.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checks import check_lora, check_not_quantised
from .numerics import accumulation_dtype, is_averaged, weighted_sum
from .rings import DiskRing, MemoryRing, Ring, clone_into
from .safetensors_files import write_safetensors
from .weights import Curve, MergeWeights, canonical_curve, merge_weights

MODES = ("anytime", "fixed", "sliding")
STORAGES = ("device", "cpu", "disk")

_UNIFORM_TOLERANCE = 1e-9
_INDEXED = frozenset({"mean", "sma", "swa", "lawa", "wma"})  # weigh by index: spacing does not matter
_POWERS = {"linear": 1.0, "one_minus_sqrt": 0.5}


@dataclass(frozen=True)
class _Layout:
    """What must stay the same about a parameter from one checkpoint to the next."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None = None  # None and below: not known yet, after a resume
    mesh: Any = None
    placements: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        local = _local(tensor)
        if local is tensor:
            return cls(tuple(tensor.shape), tuple(tensor.shape), tensor.dtype, tensor.device)
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]
        return cls(tuple(tensor.shape), tuple(local.shape), tensor.dtype, local.device, mesh, placements)

    def distribute(self, local: Tensor) -> Tensor:
        """The local shard as the DTensor that the parameter is."""
        if self.mesh is None:
            return local
        from torch.distributed.tensor import DTensor

        shape = torch.Size(self.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)


class StreamingMerge:
    """Merge of checkpoints that arrive one by one.

    Args:
        mode: "anytime", "fixed" or "sliding"; see the module's docstring.
        curve: decay curve, as in `decay_coefficients`. anytime: linear, one_minus_sqrt, polynomial(p), ema(beta),
            mean/sma/swa/lawa, wma.
        grid: as in `decay_coefficients`; anytime: "virtual_end".
        min_ratio: the curve's floor m. anytime then keeps a second copy: (1 - m) acc + m theta_k.
        num_checkpoints: window length n of fixed and sliding.
        positions: fixed: the positions that will come, when they are not evenly spaced.
        storage: where snapshots (sliding) or the accumulator (anytime, fixed) live. "disk": snapshots are files in
            `directory`, written by a thread; the accumulator of the other modes stays on the device, and `state_dict`
            writes it to a file. With "disk" a state holds no tensor, and each rank has its own files.
        directory: folder for storage="disk".
        dtype: accumulation dtype, float32 or float64; wider parameters are accumulated in their own dtype.
        rank: goes into the names of files.
        curve_args: the curve's parameters.

    Raises:
        ValueError: unknown mode or storage, a curve that the mode cannot stream, a missing argument.

    Attributes:
        required: number of checkpoints from which on `result()` is a merge.
    """

    def __init__(
        self,
        mode: str = "anytime",
        *,
        curve: Curve = "linear",
        grid: str = "virtual_end",
        min_ratio: float = 0.0,
        num_checkpoints: int | None = None,
        positions: Sequence[float] | None = None,
        storage: str = "device",
        directory: str | os.PathLike[str] | None = None,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        **curve_args: float,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}: use one of {', '.join(MODES)}")
        if storage not in STORAGES:
            raise ValueError(f"unknown storage {storage!r}: use one of {', '.join(STORAGES)}")
        if storage == "disk" and directory is None:
            raise ValueError("storage='disk' needs a directory for the snapshots")
        accumulation_dtype(torch.float32, dtype)
        if mode == "anytime" and (num_checkpoints is not None or positions is not None):
            raise ValueError(
                "mode='anytime' merges all checkpoints so far: it takes no num_checkpoints and no positions"
            )
        if mode == "fixed" and positions is not None:
            if num_checkpoints not in (None, len(positions)):
                raise ValueError(f"num_checkpoints = {num_checkpoints} but {len(positions)} positions are given")
            num_checkpoints = len(positions)
        if mode != "anytime" and (num_checkpoints is None or num_checkpoints < 2):
            raise ValueError(f"mode={mode!r} needs num_checkpoints of 2 or more, got {num_checkpoints}")
        self.mode = mode
        self.curve = curve
        self.grid = grid
        self.min_ratio = min_ratio
        self.num_checkpoints = num_checkpoints
        self.curve_args: dict[str, Any] = dict(curve_args)
        self.storage = storage
        self.directory = Path(directory) if directory is not None else None
        self.dtype = dtype
        self.rank = rank
        self._planned = list(positions) if mode == "fixed" and positions is not None else None
        self._positions: list[float] = []
        self._rate = self._anytime_rate() if mode == "anytime" else None
        if mode != "anytime":  # fail now, not at the first merge
            default_a = canonical_curve(curve) == "inv_sqrt" and "a" not in curve_args
            assert num_checkpoints is not None  # every mode but anytime asked for it
            probe = self._planned or list(range(int(default_a), num_checkpoints + int(default_a)))
            merge_weights(probe, curve, grid=grid, min_ratio=min_ratio, **self.curve_args)
        self._whole = mode == "fixed" or canonical_curve(curve) == "explicit"  # a part of the window is no merge
        self.required: int = num_checkpoints if self._whole and num_checkpoints is not None else 2
        self._ring: Ring | None = None
        self._accumulators: dict[str, Tensor] = {}
        self._latest: dict[str, Tensor] = {}
        self._layout: dict[str, _Layout] = {}
        self._aliases: dict[str, str] = {}
        self._saved_files: list[Path] = []

    # ------------------------------------------------------------------ what it holds

    @property
    def positions(self) -> list[float]:
        """Positions of the checkpoints in the present merge, oldest first."""
        return list(self._ring.positions) if self._ring is not None else list(self._positions)

    @property
    def ready(self) -> bool:
        """Whether there is a merge: of the whole window (fixed, and any list of weights), else of two or more."""
        return len(self.positions) >= self.required

    def weights(self) -> MergeWeights:
        """Merge weights of the checkpoints held so far."""
        positions = self._plan() or self.positions
        if len(positions) == 1:
            return merge_weights(positions, c=[1.0])
        return merge_weights(positions, self.curve, grid=self.grid, min_ratio=self.min_ratio, **self.curve_args)

    # ------------------------------------------------------------------ feeding

    @torch.no_grad()
    def update(self, params: Mapping[str, Tensor], position: float | None = None) -> None:
        """Take in one checkpoint. Tensors are copied; tied ones once.

        Args:
            params: name -> tensor (or DTensor, of which the local shard is taken).
            position: step or token count, increasing from call to call; default 0, 1, 2, ...

        Raises:
            ValueError: position not increasing, not evenly spaced (anytime) or not the planned one (fixed); names,
                shapes, dtypes or placements other than before; a number that is not finite; LoRA factors.
            TypeError: quantised parameters, or an entry that is no tensor.
        """
        position = self._next_position() if position is None else position
        self._check_position(position)
        layout, tensors = _read(params)
        if self._layout and layout != self._layout:
            mismatch = _describe_mismatch(self._layout, layout)
            if mismatch is not None:
                raise ValueError(mismatch)
        if not self._layout:
            check_lora("the model", layout, None)
            check_not_quantised("the model", {name: (x.dtype, x.shape) for name, x in layout.items()})
        _check_finite(tensors, position)
        if layout != self._layout:
            self._adopt(layout, tensors)
        local = {name: tensors[name] for name in tensors if name not in self._aliases}
        if self.mode == "sliding":
            self._open_ring().push(position, local)
            return
        self._positions.append(position)
        self._accumulate(local, self._step_size())

    @torch.no_grad()
    def result(
        self, out: Mapping[str, Tensor] | None = None, *, dtype: torch.dtype | str = "same"
    ) -> dict[str, Tensor]:
        """The merge.

        Args:
            out: tensors to write into (for instance the live parameters); names it lacks are left out.
            dtype: dtype of floating-point tensors when `out` is not given; "same" is each parameter's own.

        Raises:
            ValueError: nothing to merge yet; mode="fixed" or a list of weights before the last checkpoint.
        """
        count = len(self.positions)
        if count == 0:
            raise ValueError("no checkpoint yet: call update() first")
        if self._whole and count < self.required:
            what = "mode='fixed'" if self.mode == "fixed" else "a list of weights"
            raise ValueError(f"{what} is a merge only at its end: {count} of {self.required} checkpoints have come")
        names = [name for name in self._layout if name not in self._aliases and (out is None or name in out)]
        c = self.weights().c.tolist() if self.mode == "sliding" else []
        merged: dict[str, Tensor] = {}
        for name in names:
            value = self._merged_ring(name, c) if self.mode == "sliding" else self._merged_accumulator(name)
            if out is not None:
                _local(out[name]).copy_(value)
                merged[name] = out[name]
                continue
            layout = self._layout[name]
            target = dtype if isinstance(dtype, torch.dtype) and layout.dtype.is_floating_point else layout.dtype
            merged[name] = layout.distribute(value.to(layout.device or value.device, target, copy=True))
        for alias, name in self._aliases.items():
            if out is None:
                merged[alias] = merged[name]
            elif alias in out and name in out:
                _local(out[alias]).copy_(_local(out[name]))
                merged[alias] = out[alias]
        return merged

    def accumulator(self, name: str) -> Tensor | None:
        """The tensor that itself is the merge of one parameter, or None where `result` has to compute or copy it.

        A caller may exchange its values with the live parameter's, which needs no memory, and must exchange them back
        before the next `update`, `result` or `state_dict`.
        """
        if self.mode == "sliding" or not self.ready or (self.mode == "anytime" and self.min_ratio > 0.0):
            return None
        return self._accumulators.get(self._aliases.get(name, name))

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """After `load_state_dict`: check the restored merge against the live parameters before the first `result`.

        The state that one rank saved can thus be loaded by all: what differs from rank to rank (the local shape of an
        unevenly sharded parameter) is taken from the live parameter and compared with the rank's own restored tensors.

        Raises:
            ValueError: other names, shapes or dtypes (another model) or other local shapes (another sharding).
        """
        layout, tensors = _read(params)
        restored = {
            n: replace(x, local_shape=layout[n].local_shape) if n in layout else x for n, x in self._layout.items()
        }
        lines = [_describe_mismatch(restored, layout)] if restored else []
        held: Mapping[str, Tensor] = self._accumulators
        if self.mode == "sliding" and self.positions:
            ring, newest = self._open_ring(), len(self.positions) - 1
            held = {name: ring.read(newest, name) for name in self._layout if name not in self._aliases}
        lines += [
            f"{name}: {tuple(tensor.shape)} restored, {tuple(tensors[name].shape)} on this rank"
            for name, tensor in held.items()
            if name in tensors and tensor.shape != tensors[name].shape
        ]
        wrong = [line for line in lines if line is not None]
        if wrong:
            raise ValueError(
                "the restored merge does not fit this run (resume with the same model, number of ranks and sharding): "
                + "; ".join(wrong[:5])
            )
        self._adopt(layout, tensors)
        if self.storage != "cpu":
            self._accumulators = {name: t.to(tensors[name].device) for name, t in self._accumulators.items()}

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values from which `load_state_dict` continues exactly; readable with `weights_only=True`.

        storage="disk": no tensors; the files are complete when this returns. Otherwise local shards: a sharded model
        whose trainer saves callback state from rank 0 only needs storage="disk".
        """
        layout = {
            name: [list(x.shape), list(x.local_shape), str(x.dtype).removeprefix("torch.")]
            for name, x in self._layout.items()
        }
        aliases = dict(self._aliases)
        state: dict[str, Any] = {"mode": self.mode, "curve": self._curve_key(), "aliases": aliases, "layout": layout}
        if self.mode == "sliding":
            state["ring"] = self._open_ring().state_dict()
            return state
        state["positions"] = list(self._positions)
        tensors = {f"accumulator.{name}": t for name, t in self._accumulators.items()}
        tensors |= {f"latest.{name}": t for name, t in self._latest.items()}
        if self.storage == "disk" and self._positions:
            self._save_accumulators(tensors)
        else:
            state["tensors"] = {name: t.clone() for name, t in tensors.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: the state is of another mode, or (anytime, fixed) of another curve.
            FileNotFoundError: storage="disk" and a file of the state is gone.
        """
        if state["mode"] != self.mode:
            raise ValueError(f"the saved merge has mode {state['mode']!r}, this one {self.mode!r}")
        if self.mode != "sliding" and state["curve"] != self._curve_key():
            raise ValueError(
                f"the saved accumulator follows {state['curve']}, not {self._curve_key()}: an accumulator commits to "
                "its curve. Keep the curve, or use mode='sliding'"
            )
        self._aliases = dict(state["aliases"])
        self._layout = {
            name: _Layout(tuple(shape), tuple(local), getattr(torch, dtype))
            for name, (shape, local, dtype) in state["layout"].items()
        }
        if self.mode == "sliding":
            self._open_ring().load_state_dict(state["ring"])
            return
        self._positions = list(state["positions"])
        tensors = state.get("tensors")
        if tensors is None:
            tensors = self._load_accumulators() if self._positions else {}
        device = "cpu" if self.storage == "cpu" else None
        tensors = clone_into(None, tensors, device, False)
        self._accumulators = {n.removeprefix("accumulator."): t for n, t in tensors.items() if n.startswith("acc")}
        self._latest = {n.removeprefix("latest."): t for n, t in tensors.items() if n.startswith("latest.")}

    def flush(self) -> None:
        """Wait for snapshots that are still being written."""
        if self._ring is not None:
            self._ring.flush()

    def close(self) -> None:
        """Finish writing and release the ring; files stay."""
        if self._ring is not None:
            self._ring.close()

    # ------------------------------------------------------------------ inner parts

    def _anytime_rate(self) -> Callable[[int], float]:
        """b as a function of k, the index of the arriving checkpoint."""
        name = canonical_curve(self.curve)
        if self.grid != "virtual_end":
            raise ValueError(f"mode='anytime' needs grid='virtual_end', got {self.grid!r}: use mode='sliding'")
        accepted = {"polynomial": {"p"}, "ema": {"beta"}}.get(name, set())
        if name not in ("polynomial", "ema", *_POWERS, *_INDEXED):
            raise ValueError(
                f"curve {self.curve!r} has no any-time form: use mode='sliding', or one of linear, one_minus_sqrt, "
                "polynomial(p), ema(beta), mean, wma"
            )
        if set(self.curve_args) != accepted:
            needs = ", ".join(accepted) or "no parameters"
            raise ValueError(f"any-time {name} takes {needs}, got {', '.join(self.curve_args) or 'none'}")
        merge_weights(2, self.curve, min_ratio=self.min_ratio, **self.curve_args)  # checks the values
        if name == "ema":
            beta = self.curve_args["beta"]
            return lambda k: 1.0 - beta if k else 1.0
        if name == "wma":
            return lambda k: 2.0 / (k + 2.0)
        p = _POWERS.get(name, self.curve_args.get("p", 1.0))
        return lambda k: 1.0 - (k / (k + 1.0)) ** p

    def _step_size(self) -> float:
        """b of the checkpoint just appended to `_positions`."""
        k = len(self._positions) - 1
        if self._rate is not None:
            return self._rate(k)
        if k == 0:
            return 1.0
        c = self.weights().c
        passed = c[: k + 1].sum()
        return float(c[k] / passed) if passed > 0.0 else 1.0

    def _plan(self) -> list[float] | None:
        """All positions of a fixed window: as given, else evenly on from the first two."""
        if self.mode != "fixed" or self._planned is not None:
            return self._planned
        if len(self._positions) < 2:
            return None
        first, second = self._positions[:2]
        return [first + j * (second - first) for j in range(self.num_checkpoints or 0)]

    def _accumulate(self, local: Mapping[str, Tensor], b: float) -> None:
        first = len(self._positions) == 1
        fused: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, tensor in local.items():
            if not is_averaged(name, tensor.dtype):
                continue
            if first:
                wide = accumulation_dtype(tensor.dtype, self.dtype)
                device = "cpu" if self.storage == "cpu" else tensor.device
                self._accumulators[name] = tensor.detach().to(device, wide, copy=True)
                continue
            accumulator = self._accumulators[name]
            if accumulator.device != tensor.device and self.storage == "device":
                accumulator = self._accumulators[name] = accumulator.to(tensor.device)
            if accumulator.dtype == tensor.dtype and accumulator.device == tensor.device:
                fused[0].append(accumulator)
                fused[1].append(tensor.detach())
            else:
                accumulator.lerp_(tensor.detach().to(accumulator.device, accumulator.dtype), b)
        if fused[0]:
            torch._foreach_lerp_(fused[0], fused[1], b)
        anytime_floor = self.mode == "anytime" and self.min_ratio > 0.0
        kept = {n: t for n, t in local.items() if anytime_floor or not is_averaged(n, t.dtype)}
        self._latest = clone_into(self._latest or None, kept, "cpu" if self.storage == "cpu" else None, False)

    def _merged_accumulator(self, name: str) -> Tensor:
        accumulator = self._accumulators.get(name)
        if accumulator is None:
            return self._latest[name]
        if self.mode == "anytime" and self.min_ratio > 0.0:
            return torch.lerp(accumulator, self._latest[name].to(accumulator), self.min_ratio)
        return accumulator

    def _merged_ring(self, name: str, c: Sequence[float]) -> Tensor:
        ring = self._open_ring()
        newest = ring.read(len(c) - 1, name)
        if not is_averaged(name, newest.dtype):
            return newest
        wide = accumulation_dtype(newest.dtype, self.dtype)
        device = self._layout[name].device or newest.device
        return weighted_sum((ring.read(i, name).to(device) for i in range(len(c))), c, wide)

    def _open_ring(self) -> Ring:
        if self._ring is None:
            assert self.num_checkpoints is not None
            if self.storage == "disk":
                assert self.directory is not None
                self._ring = DiskRing(self.num_checkpoints, self.directory, self.rank)
            else:
                self._ring = MemoryRing(self.num_checkpoints, on_cpu=self.storage == "cpu")
        return self._ring

    def _adopt(self, layout: dict[str, _Layout], tensors: Mapping[str, Tensor]) -> None:
        """Remember names, shapes and placements of the first checkpoint, and which tensors are one and the same."""
        self._layout = layout
        owners: dict[tuple[Any, ...], str] = {}
        self._aliases = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                if owners.setdefault(key, name) != name:
                    self._aliases[name] = owners[key]

    def _next_position(self) -> float:
        positions = self.positions
        return positions[-1] + 1 if positions else 0

    def _check_position(self, position: float) -> None:
        positions = self.positions
        if positions and position <= positions[-1]:
            raise ValueError(f"positions must increase strictly: {position} follows {positions[-1]}")
        if self.mode == "fixed":
            if len(positions) == self.num_checkpoints:
                raise ValueError(f"mode='fixed' has all its {self.num_checkpoints} checkpoints: {position} is one more")
            plan = self._plan()
            if plan is not None and not _close(position, plan[len(positions)]):
                raise ValueError(
                    f"mode='fixed' expected position {plan[len(positions)]:g} next, got {position:g}: an unevenly "
                    "spaced window must be given as positions=[...]"
                )
        uniform = self.mode == "anytime" and canonical_curve(self.curve) not in _INDEXED
        if uniform and len(positions) >= 2 and not _close(position - positions[-1], positions[1] - positions[0]):
            raise ValueError(
                f"the any-time form of {self.curve!r} needs even spacing: {position:g} comes "
                f"{position - positions[-1]:g} after {positions[-1]:g}, the others {positions[1] - positions[0]:g} "
                "apart; use mode='sliding'"
            )

    def _curve_key(self) -> str:
        """Text that identifies curve, grid, floor and parameters."""
        curve = canonical_curve(self.curve)
        values = list(self.curve) if curve == "explicit" else curve  # type: ignore[arg-type]
        return f"{values} {sorted(self.curve_args.items())} grid={self.grid} min_ratio={self.min_ratio}"

    def _accumulator_path(self) -> Path:
        assert self.directory is not None
        return self.directory / f"accumulator-{int(self._positions[-1]):015d}-rank{self.rank:05d}.safetensors"

    def _save_accumulators(self, tensors: Mapping[str, Tensor]) -> None:
        path = self._accumulator_path()
        write_safetensors(path, {name: t.cpu() for name, t in tensors.items()})
        # Two states back, as for snapshots: the newest checkpoint may be torn.
        self._saved_files = [*(f for f in self._saved_files if f != path), path]
        while len(self._saved_files) > 2:
            self._saved_files.pop(0).unlink(missing_ok=True)

    def _load_accumulators(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        path = self._accumulator_path()
        if not path.is_file():
            raise FileNotFoundError(f"the merge accumulator {path} is missing: resume from a newer checkpoint")
        self._saved_files = [path]
        return load_file(path)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _UNIFORM_TOLERANCE * max(abs(a), abs(b), 1.0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _read(params: Mapping[str, Tensor]) -> tuple[dict[str, _Layout], dict[str, Tensor]]:
    """Layouts and local tensors of a checkpoint.

    Raises:
        TypeError: an entry is no tensor.
    """
    layout, tensors = {}, {}
    for name, tensor in params.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        layout[name], tensors[name] = _Layout.of(tensor), _local(tensor.detach())
    return layout, tensors


def _check_finite(tensors: Mapping[str, Tensor], position: float) -> None:
    """One reduction over all tensors and one wait for the device.

    Raises:
        ValueError: names a tensor that holds NaN or infinity, and the position.
    """
    floats = {name: t for name, t in tensors.items() if is_averaged(name, t.dtype)}
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in floats.values():
        groups.setdefault(tensor.device, []).append(tensor)
    # A norm is finite when all numbers are (and its square does not overflow): only then look closely.
    if all(bool(torch.isfinite(torch.stack(torch._foreach_norm(group))).all()) for group in groups.values()):
        return
    for name, tensor in floats.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"position {position:g}: {name} holds a number that is not finite (NaN or infinity)")


def _describe_mismatch(before: Mapping[str, _Layout], now: Mapping[str, _Layout]) -> str | None:
    """The first differences between two checkpoints' parameters, or None."""
    lines = [f"{name}: missing" for name in before if name not in now]
    lines += [f"{name}: new" for name in now if name not in before]
    for name, a in before.items():
        if (b := now.get(name, a)) == a:
            continue
        for key in [f.name for f in fields(_Layout)]:
            x, y = getattr(a, key), getattr(b, key)
            known = a.device is not None or key in ("shape", "local_shape", "dtype")
            if x != y and known:
                lines.append(f"{name}: {key} {y}, was {x}")
    if not lines:
        return None
    more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
    return "the parameters differ from those merged so far: " + "; ".join(lines[:5]) + more
