"""The only ctypes and the only C: llama.cpp's public libraries, the tensor structure, the eval hook, memory and I/O."""
