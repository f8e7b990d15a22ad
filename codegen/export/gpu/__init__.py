"""What a library for GPUs has beside that of every library: the driver, the device, and launches."""
