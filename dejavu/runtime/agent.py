"""Torch's elastic agent as a child that ends when its parent ends; takes the words of torchrun."""

from __future__ import annotations

import os
import signal
import sys

from torch.distributed.run import main

from dejavu.runtime.process import die_with_parent, named_parent

if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)  # the agent ends its ranks on SIGTERM
    os.environ.update(named_parent())  # for the ranks
    main(sys.argv[1:])
