"""What the documentation's build adds to the pages: two references, and a navigation without gaps."""
