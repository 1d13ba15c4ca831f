"""What must be so before any test runs, and in every process that tests start."""

import os
import signal

import torch

# Where there is no GPU, Triton kernels run in its interpreter: chosen before they are first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts a command in the background has it ignore SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
