"""The stages of a campaign, each a module with ``check(settings, name)``, which gives the rows of one check."""
