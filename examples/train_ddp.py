"""Train a small transformer with DistributedDataParallel, and compare the losses with those over another backend.

torchrun --nproc-per-node 2 examples/train_ddp.py --compare gloo
"""

import gc

import text
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

args = text.arguments(__doc__).parse_args()
device = text.start(args)
curves = {}
for backend, group in text.groups(args).items():
    model = text.Transformer().to(device)
    model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    curves[backend] = text.Curve().train(model, group, args.steps, device)
text.report(curves)
gc.collect()
dist.destroy_process_group()
gc.collect()  # what else holds a gloo group lets go: its threads abort the process when they outlive the interpreter
