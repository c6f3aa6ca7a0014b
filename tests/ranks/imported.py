"""All that a rank imports, imported once: the ranks of a pool are forked from a process that has run this module.

Importing takes a rank seven seconds of computing, a fork a hundredth. Nothing here may start a thread or touch a device.
"""

import contextlib
import gc
import importlib
import os

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # read by what is imported
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator would start a thread

MODULES = """
hypothesis pytest safetensors.torch torch.distributed.tensor torch.testing torch.utils.checkpoint
transformers.loss.loss_utils transformers.modeling_utils transformers.models.llama.modeling_llama
transformers.hf_argparser bigtrain.run.arguments bigtrain.run.capacity bigtrain.checkpoint bigtrain.data bigtrain.diagnostics
bigtrain.engine bigtrain.hosts.rollcall bigtrain.run.job bigtrain.models bigtrain.run.preflight bigtrain.run.sameness bigtrain.train bigtrain.watch bigtrain.weights
tests.ranks.families tests.ranks.tiny tests.ranks.zoo
deepspeed.module_inject.auto_ep_layer deepspeed.ops.adam deepspeed.runtime.superoffload.superoffload_stage3
deepspeed.runtime.zero.muon.muon_optimizer matplotlib.pyplot torch.utils.tensorboard
datasets bigtrain.data.loader bigtrain.data.sets bigtrain.diagnostics.report bigtrain.kernels.cudnn_attention bigtrain.optim.chunks
bigtrain.run.restart bigtrain.run.saving bigtrain.weights.export bigtrain.weights.partial deepspeed.comm.mori
matplotlib.backends.backend_agg matplotlib.backends.backend_svg PIL.JpegImagePlugin transformers.models.encoder_decoder
transformers.convert_slow_tokenizer transformers.integrations.mistral transformers.tokenization_utils_tokenizers
""".split()  # noqa: SIM905

for name in MODULES:
    with contextlib.suppress(ImportError):  # whoever needs it will say so
        importlib.import_module(name)

from bigtrain import zero  # noqa: E402

zero.why_no_cpu_adam()  # loaded, and what it asks about this CPU remembered
gc.collect()
gc.freeze()  # a collection in a forked rank would touch, and so copy, all of it
