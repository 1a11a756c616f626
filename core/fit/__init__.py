"""Does a model run here, and how fast: answered from its header, this machine and measured routing, before any run."""
