"""Bytes that no formula gives: measured once per kind of machine, named, with what they rest on; and what a run takes at a time.

The modules of the run read the latter from here, so that they cannot take other sizes than those that are planned.
"""

from __future__ import annotations

_MIB, _GIB = 2**20, 2**30

# CUDA context, cuBLAS/cuDNN/Triton modules of one process: with NCCL's, what the driver counts beside reserved memory was 1.41 to
# 1.51e9 B in five single-card runs on an H100 (torch 2.11+cu130, liger, cuDNN attention), 1.48e9 in one of plain DeepSpeed.
CUDA_CONTEXT_BYTES = 880 * _MIB
# cuBLAS workspace on Hopper: 32 MiB for each of two streams (torch allocates it in its own pool).
CUBLAS_WORKSPACE_BYTES = 64 * _MIB
# NCCL of one process: 512 MiB even for a single rank (NCCL 2.28.9, github.com/NVIDIA/nccl issue 2363). With more ranks DeepSpeed's
# groups have communicators of their own: beside context and reserved memory the driver counted 0.98 to 1.02e9 B in six runs of two
# H200 and three of four, and 1.28 to 1.30e9 in five of two (torch 2.11+cu130, NVLS off); planned is the most. Beyond that 72 MB a rank
# (issue 964: 544 MB for two ranks, 688 MB for four).
NCCL_SINGLE_BYTES = 512 * _MIB
NCCL_SEVERAL_BYTES = 1_300_000_000
NCCL_MEASURED_RANKS = 4
NCCL_PER_FURTHER_RANK_BYTES = 72_000_000
# A communicator grows by channels, not without end: eight ranks of one host and more share rings.
NCCL_RANKS_THAT_GROW_IT = 8

# Resident set of a training process before any buffer (PSS). With CUDA, once it steps: 2.10e9 B each where two ran on one host (median
# of twelve runs of launch/train.py on H200s, with nothing on the host), 2.28e9 where one ran alone (eleven on an H200: 2.24 to
# 2.50e9, five on an H100: 2.12 to 2.35e9): two share 0.40e9 of library code and read-only data. Until the first step libraries and
# kernels of it are missing: 1.55e9 each of two, 1.69e9 alone (docs/results/plan_accuracy.md).
# On CPUs (torch 2.13, deepspeed 0.19.8, transformers 5.24): what launch/train.py holds by itself once it steps, which is Python
# objects and library data of its own, and library code that the ranks of a host share.
_CUDA_PRIVATE_BYTES, _CUDA_SHARED_BYTES = 1_880_000_000, 400_000_000
_CUDA_PRIVATE_UNTIL_STEPS_BYTES, _CUDA_SHARED_UNTIL_STEPS_BYTES = 1_410_000_000, 280_000_000
_CPU_PRIVATE_BYTES = 385 * _MIB
_CPU_SHARED_BYTES = 170 * _MIB

# ---------------------------------------------------------------- what a run takes at a time

# Streamed state (optim/stream.py): large enough that a copy runs at the bus's full rate (53 GB/s on PCIe gen 5: 2.5 ms), and how
# many chunks of it are on the GPU, where the ds_config says no buffer_count.
STATE_CHUNK_BYTES = 128 * _MIB
STATE_BUFFERS = 4
# Gradients that leave (optim/spill.py). On their way down: COMPUTE waits for the oldest before more than this lies on the device (10 ms
# of PCIe gen 5). On their way to their update: chunks.
GRADIENTS_IN_FLIGHT_BYTES = 512 * _MIB
GRADIENT_AREAS = 4
# Gradients that do not follow each other in memory are copied together this many elements at a time (optim/pieces.py).
GATHER_ELEMS = 1 << 25
# With an fp32 master on a CPU an update takes so many for each thread: temporaries should stay in the caches of the cores: 4.5 ns an
# element, 10 in one piece (40e6 on one core; optim/chunks.py).
CPU_CHUNK_ELEMS = 1 << 16
# Without Triton, fp32 logits alive at a time, in elements (kernels/cross_entropy.py): on a GPU enough rows to fill it, on a CPU few
# enough to stay near the cache; and elements of its gradients that are scaled at a time.
CHUNK_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 22}
SCALED_AT_A_TIME = 1 << 22
# On CPUs freed blocks below this go back to malloc's heap, larger ones to the system (zero/startup.py `map_blocks` sets glibc's threshold).
MALLOC_MMAP_BYTES = 512 * 1024
# Page-locked memory comes in powers of two (torch's CachingHostAllocator): of a block that is kept in pieces (models/hostinputs.py) no
# more than this part is rounding, or so many bytes.
_WASTE, _LITTLE = 1 / 32, 2**16
# Whole fp32 parameters that a build at stage 3 holds at once (models/window.py).
WINDOW_BYTES = 512 * _MIB

# ---------------------------------------------------------------- reading, saving, margins

# Reading weights: rank-local byte ranges through one buffer. Saving: two staging buffers of the writer.
READ_BUFFER_BYTES = 64 * _MIB
SAVE_BUFFER_BYTES = 512 * _MIB

# A configuration "fits" with this much to spare: error of the predictions, and what else lives on the card or host. Fragmentation is
# not in it: the least that the allocator must reserve is replayed (plan/allocator.py). Of 52 rows of H200s, Llama and Qwen, none
# needed more than 0.01 % above that; of ten of five more
# families, planned before they ran, four did, by up to 3.6 % (docs/results/plan_accuracy.md).
GPU_MARGIN = 0.025
HOST_MARGIN = 0.05


def process_bytes(device: str, ranks_per_node: int) -> int:
    """Host memory of one rank's process before any buffer; what ranks of a host share is divided among them (as PSS is)."""
    if device == "cuda":
        return _CUDA_PRIVATE_BYTES + _CUDA_SHARED_BYTES // ranks_per_node
    return _CPU_PRIVATE_BYTES + _CPU_SHARED_BYTES // ranks_per_node


def process_start_bytes(device: str, ranks_per_node: int) -> int:
    """The same until the first step."""
    if device == "cuda":
        return _CUDA_PRIVATE_UNTIL_STEPS_BYTES + _CUDA_SHARED_UNTIL_STEPS_BYTES // ranks_per_node
    return process_bytes(device, ranks_per_node)


def nccl_bytes(world_size: int) -> int:
    """Device memory of NCCL in one process."""
    if world_size == 1:
        return NCCL_SINGLE_BYTES
    further = max(0, min(world_size, NCCL_RANKS_THAT_GROW_IT) - NCCL_MEASURED_RANKS)
    return NCCL_SEVERAL_BYTES + further * NCCL_PER_FURTHER_RANK_BYTES


def pinned_bytes(size: float) -> int:
    """What a pinned block of `size` bytes takes: the next power of two."""
    return 1 << (max(1, int(size)) - 1).bit_length()


def pieces(size: int) -> list[int]:
    """Bytes of the pieces in which to keep a block of so many bytes: a block of 2.4e9 would take 4.3e9, its pieces take 2.4e9.

    Powers of two, the largest first, and a rest that may be rounded up. A block that is a power of two, or a little less, is one piece.
    """
    found: list[int] = []
    rest, spare = size, max(_LITTLE, int(size * _WASTE))
    while rest > 0:
        whole = pinned_bytes(rest)
        piece = rest if whole - rest <= spare else whole // 2
        found.append(piece)
        rest -= piece
    return found
