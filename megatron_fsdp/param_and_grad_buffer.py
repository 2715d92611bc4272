# SPDX-License-Identifier: Apache-2.0
"""DTensors of parameters. See `megatron.fsdp.dtensor.checkpointing`."""

from megatron.fsdp.dtensor.checkpointing import make_fsdp_dtensor
from megatron_fsdp.not_offered import attributes_of

__all__ = ["make_fsdp_dtensor"]

_BUFFERS = "a sharded model makes its flat buffers itself; its main weights are model.parameters()"
__getattr__ = attributes_of(
    __name__,
    {
        "AllGatherPipeline": "call model.start_param_sync() and model.synchronize_param_gather()",
        "BucketingPolicy": "pass fsdp_unit_modules and suggested_communication_unit_size",
        "DataParallelBuffer": _BUFFERS,
        "GradReducePipeline": "call model.start_grad_sync() and model.finish_grad_sync()",
        "ParamAndGradBuffer": _BUFFERS,
        "ParameterGroup": _BUFFERS,
    },
)
