"""Architecture rows: which tensors hold routed experts."""
