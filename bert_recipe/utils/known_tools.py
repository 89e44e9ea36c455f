"""Files and folders of other tools that are not read as they are: what each is, and the way out."""

OTHER_TOOLS = "docs/other_tools.md"
LABEL_STUDIO = f"this is Label Studio's JSON: convert it as {OTHER_TOOLS} says"
