"""A report as one page of HTML, and two reports side by side."""
