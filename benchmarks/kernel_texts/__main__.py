from torch_mlc.runtime.plain_text import write_out

from .cli import main

if __name__ == "__main__":
    write_out()
    main(prog_name="python -m benchmarks.kernel_texts")
