"""`python -m torch_mlc …`: only hands over to the command line in dynamo_backend/cli."""

from .dynamo_backend.cli.main import main

if __name__ == "__main__":
    main("python -m torch_mlc")
