"""Where there is no GPU, Triton kernels run in its interpreter: chosen before they are first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
