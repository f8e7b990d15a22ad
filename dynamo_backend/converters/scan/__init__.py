"""Running sums and their kin, by functions of the user's too."""
