"""The package: its rooms are the folders of the checkout, to which this folder holds a link each."""
