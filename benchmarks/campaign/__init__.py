"""The suite ``campaign``: everything that a GPU can tell of the compiler in ten or 45 minutes, in processes that may
crash."""
