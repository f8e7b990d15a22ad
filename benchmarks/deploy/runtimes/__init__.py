"""The runtimes: how each exports the program in ``program.pt2`` of a folder, and loads and calls what it has written.

A module has ``write(folder, threads)``, which returns the files that are taken along, ``inputs(folder)``,
``load(folder, inputs, threads)``, which returns a call without arguments, and ``keep(folder, results)``.
``WRITES_WITH`` are modules that exporting needs and calling does not.
"""
