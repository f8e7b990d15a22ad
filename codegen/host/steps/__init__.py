"""The steps of host programs, and what is asked of them."""
