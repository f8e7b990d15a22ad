"""ELF: relocatable objects of LLVM's become one shared object, or one relocatable object, without a linker."""
