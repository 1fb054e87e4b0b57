"""What is refused, adjusted or warned about before training starts."""
