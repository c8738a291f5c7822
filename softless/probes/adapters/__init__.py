"""How attention is found in a running model: our layers say what they mix; of others, calls of PyTorch are watched."""
