"""What every worker of tests/distributed.py needs, imported once in the process that they are forked from."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: F401
import torch  # noqa: F401
