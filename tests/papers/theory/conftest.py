"""The theorems' package is at the top of the checkout, where pytest does not look."""

from coterie.papers import theorems

theorems.load("a test")
