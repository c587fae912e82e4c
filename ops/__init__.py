"""Native ops: what PyTorch itself lacks, in C++ and CUDA. Importing them builds nothing.

`registry` lists the ops, `toolchain` finds the compilers, `build` compiles into a private cache, and `load` makes an op
callable. Each op has a module of its own, with a version in plain torch.
"""
