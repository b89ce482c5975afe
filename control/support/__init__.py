"""What every layer above may use and what knows none of them: files, texts of exceptions, checks of numbers, pages."""
