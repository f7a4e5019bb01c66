"""Off-line merge against the time to read the same bytes once.

    python benchmarks/merge_offline.py [--num-checkpoints 16] [--megabytes 256] [--directory DIR]

Targets: ratio at most 1.5 with 16 checkpoints, peak memory under two tensors plus 100 MB. Each case runs in a process
of its own. "disk": the page cache is emptied of these files before each measurement, so both sides wait for the disk.
"cached": both sides find the bytes in memory. Inputs with a recorded digest are those that this project's own trainer
writes (`<checkpoint>.sha256`); for others merge.json's SHA-256 is computed on the fly, which costs about one
core-second a gigabyte whatever the disk does.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch


def llama_like_shapes(num_bytes: int, itemsize: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder of about this size: embedding, and layers of attention, MLP and norms."""
    width = max(64, int((num_bytes / itemsize / 60) ** 0.5) // 64 * 64)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (8 * width, width)}
    layer = 0
    while sum(torch.Size(s).numel() for s in shapes.values()) * itemsize < num_bytes:
        for name, shape in (
            ("q", (width, width)),
            ("up", (3 * width, width)),
            ("down", (width, 3 * width)),
            ("norm", (width,)),
        ):
            shapes[f"layers.{layer}.{name}.weight"] = shape
        layer += 1
    return shapes


def write_checkpoints(directory: Path, count: int, num_bytes: int, dtype: torch.dtype, recorded: bool) -> list[Path]:
    """Checkpoints of one affine trajectory, oldest first."""
    from safetensors.torch import save_file

    shapes = llama_like_shapes(num_bytes, dtype.itemsize)
    base = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in shapes.items()}
    paths = []
    for step in range(count):
        path = directory / f"step={step}.safetensors"
        save_file({name: (t * (1.0 + 1e-3 * step)).to(dtype) for name, t in base.items()}, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        if recorded:
            digest = hashlib.file_digest(open(path, "rb"), "sha256").hexdigest()  # noqa: SIM115
            path.with_name(path.name + ".sha256").write_text(f"# size={path.stat().st_size}\n{digest}  {path.name}\n")
        paths.append(path)
    return paths


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(paths: list[Path]) -> float:
    """Seconds to read every byte once, file after file, into one reused buffer."""
    buffer = memoryview(bytearray(4 << 20))
    start = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def merge_once(paths: list[Path], output: Path, cold: bool) -> dict[str, float]:
    """Seconds and peak memory (bytes above the start) of one merge in this process."""
    from fulgurite.callbacks.checkpoint_merging import merge_checkpoints

    merge_checkpoints(paths[:2], output, curve="linear")  # imports and thread pools out of the way
    shutil.rmtree(output) if output.is_dir() else output.unlink()
    Path(f"{output}.merge.json").unlink(missing_ok=True)
    if cold:
        forget(paths)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    start = time.perf_counter()
    merge_checkpoints(paths, output, curve="1-sqrt")
    return {"seconds": time.perf_counter() - start, "peak_bytes": _status("VmHWM") - before}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{field} is not in /proc/self/status")


def measure(paths: list[Path], directory: Path, cached: bool, repeats: int) -> dict[str, float]:
    """Best of `repeats` alternating reads and merges."""
    reads, merges = [], []
    for _ in range(repeats):
        read_once(paths) if cached else forget(paths)
        reads.append(read_once(paths))
        output = directory / "merged.safetensors"
        command = [sys.executable, __file__, "--child", str(output), *map(str, paths)]
        if not cached:
            command.insert(2, "--cold")
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        merges.append(json.loads(done.stdout.splitlines()[-1]))
        output.unlink()
        Path(f"{output}.merge.json").unlink()
    seconds = min(m["seconds"] for m in merges)
    return {
        "read_s": min(reads),
        "merge_s": seconds,
        "ratio": seconds / min(reads),
        "peak_mb": max(m["peak_bytes"] for m in merges) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-checkpoints", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=256, help="size of one checkpoint")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=None, help="where to write the checkpoints")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    arguments = parser.parse_args()
    rows = []
    for dtype, recorded in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            directory = Path(folder)
            num_bytes = arguments.megabytes * 10**6
            paths = write_checkpoints(directory, arguments.num_checkpoints, num_bytes, dtype, recorded)
            shapes = llama_like_shapes(num_bytes, dtype.itemsize).values()
            largest = max(torch.Size(s).numel() for s in shapes) * dtype.itemsize / 1e6
            for cached in (False, True):
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "digest": "recorded" if recorded else "computed",
                    "bytes": "cached" if cached else "disk",
                    **measure(paths, directory, cached, arguments.repeats),
                    "allowed_mb": 2 * largest + 100,
                }
                rows.append(row)
                print(
                    "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
                    flush=True,
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    if "--child" in sys.argv:
        files = [Path(p) for p in sys.argv[sys.argv.index("--child") + 1 :]]
        print(json.dumps(merge_once(files[1:], files[0], "--cold" in sys.argv)))
    else:
        main()
