"""Models of other libraries, split into chunks: one subpackage per library, each behind an extra of its own."""
