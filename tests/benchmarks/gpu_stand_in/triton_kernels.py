"""Prints how many kernels of --attention triton are compiled on the stand-in for a GPU, forward and
backward, for streams of several sizes.
"""

import torch

from bert_recipe.experiments.triton_kernels import attend, backward_kernel, forward_kernel

LENGTH = 16


def main() -> None:
    for sequences, missing in ((16, 0), (16, 1), (7, 0), (1, 0)):
        ends = torch.arange(sequences + 1, dtype=torch.int32) * LENGTH
        ends[-1] -= missing
        shape = (int(ends[-1]), 3, 1, 16)
        qkv_T3HD = torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out_THD = attend(qkv_T3HD, ends.cuda(), LENGTH, None, False, 0.1)
        out_THD.sum().backward()
    for kernel in (forward_kernel, backward_kernel):
        print(sum(len(caches[0]) for caches in kernel.device_caches.values()))


if __name__ == "__main__":
    main()
