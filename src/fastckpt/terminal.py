"""Text from a file, made fit to be shown: what a file calls its tensors must do nothing to a terminal."""


def printable(text, keep=""):
    """Text with every character escaped that is not there to be seen, newlines too, but for those in ``keep``."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() or c in keep else escaped(c) for c in text])


def in_lines(texts):
    """One line for each text, whatever is in it: a file's names, and its own, write no lines."""
    return "\n".join(map(printable, texts))


def escaped(character):
    return character.encode("unicode-escape", "backslashreplace").decode("ascii")
