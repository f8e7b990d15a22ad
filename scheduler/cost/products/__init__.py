"""What products cost: in a library, in loops of ours, in another order."""
