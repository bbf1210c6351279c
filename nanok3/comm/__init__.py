"""How ranks exchange data: knows tensors, ranks and deadlines, nothing of the model."""
