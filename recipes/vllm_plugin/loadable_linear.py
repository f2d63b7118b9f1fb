"""A vLLM plugin for CPU servers whose weights are pushed: linear layers keep the weights that a reload writes.

vLLM's CPU backend packs the weight of every linear layer when it loads a model and drops the original, so that a later
reload reports success and changes nothing there. This keeps those layers on plain matrix products. vLLM finds plugins by
the metadata beside this file when the folder is on PYTHONPATH (`recipes/serve_vllm.sh` puts it there), in every process
of the server. It changes nothing on GPUs.
"""


def _keep_weight(layer, remove_weight):
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def register():
    import vllm.model_executor.layers.utils as layers

    layers.dispatch_cpu_unquantized_gemm = _keep_weight
