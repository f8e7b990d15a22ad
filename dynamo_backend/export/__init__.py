"""Models as libraries: programs of ``torch.export`` to folders that need neither Python nor torch."""
