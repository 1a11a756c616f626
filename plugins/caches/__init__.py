"""Cache policies: which expert to give up."""
