"""Dense placements: where the other weights live."""
