"""Where tests of kernels run: on the GPU when there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
